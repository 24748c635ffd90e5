//! Match, store, remove and memory of the index, beside its peers.

use std::ops::Range;

use serde_json::{Value, json};

use crate::measure::{count, live_bytes, median};
use crate::sides::{Concurrent, Depths, Ours, Radix, Side};
use crate::workload::{STEP_BLOCKS, Scenario, Workload};

/// Names of the sides, in the order of all arrays here.
const SIDES: [&str; 3] = ["ours", "radix", "concurrent"];
const HITS: [&str; 3] = ["none", "half", "full"];
/// Questions of one batch; each batch of a round repeats until about so many blocks were asked for.
const QUESTIONS: usize = 256;
const BLOCKS_ASKED: usize = 32_768;
/// Blocks of events that are made before they are timed.
const BATCH_BLOCKS: usize = 65_536;
/// Events handed over at once where memory is measured: what waits in the peer's queue shall not count.
const WEIGHED_EVENTS: usize = 256;

type Samples = [Vec<f64>; 3];

fn scenarios(quick: bool) -> Vec<Scenario> {
    let mut all = Vec::new();
    let (workers, blocks): (&[usize], &[usize]) = match quick {
        true => (&[64], &[64, 1024]),
        false => (&[64, 256], &[64, 256, 1024, 8192]),
    };
    // Hash tables double: five eighths of a power of two is an average load.
    let unit = if quick { 40_960 } else { 163_840 };
    for &workers in workers {
        for &blocks in blocks {
            for (holders, entries) in [(1, unit), (workers, 8 * unit)] {
                all.push(Scenario {
                    workers,
                    blocks,
                    holders,
                    step: STEP_BLOCKS,
                    entries,
                });
            }
        }
    }
    let decoding = Scenario {
        workers: 64,
        blocks: 256,
        holders: 1,
        step: 1,
        entries: unit,
    };
    all.push(decoding);
    if !quick {
        all.push(Scenario {
            workers: 256,
            blocks: 256,
            holders: 16,
            step: STEP_BLOCKS,
            entries: 16 * unit,
        });
    }
    all
}

/// All rows.
pub fn rows(quick: bool) -> Vec<Value> {
    let rounds = if quick { 2 } else { 3 };
    let mut rows = Vec::new();
    for scenario in scenarios(quick) {
        eprintln!(
            "index: {} workers, {} blocks, {} holders, {} an event",
            scenario.workers, scenario.blocks, scenario.holders, scenario.step
        );
        measure(&Workload::new(scenario), rounds, &mut rows);
    }
    rows
}

fn measure(workload: &Workload, rounds: usize, rows: &mut Vec<Value>) {
    let scenario = workload.scenario;
    let questions =
        [0, scenario.blocks / 2, scenario.blocks].map(|known| workload.questions(known, QUESTIONS));
    let (memory, entries) = weigh(workload, &questions);
    let mut found: [Samples; 3] = Default::default();
    let mut stored = Samples::default();
    let mut removed = Samples::default();
    for round in 0..rounds {
        let mut sides: [Box<dyn Side>; 3] = [
            Box::new(Ours::new(scenario.workers)),
            Box::new(Radix::default()),
            Box::new(Concurrent::default()),
        ];
        // Each round begins with another side.
        let order = [0, 1, 2].map(|at| (at + round) % 3);
        for &side in &order {
            let ns = store(workload, &mut *sides[side], usize::MAX);
            stored[side].push(entries as f64 * 1e3 / ns as f64);
        }
        let repeats = (BLOCKS_ASKED / scenario.blocks / questions[0].len()).max(1);
        for _ in 0..3 {
            for (asked, found) in questions.iter().zip(&mut found) {
                for &side in &order {
                    let ns = sides[side].find(asked, repeats);
                    found[side].push(ns as f64 / 1e3 / (repeats * asked.len()) as f64);
                }
            }
        }
        for &side in &order {
            let ns = remove(workload, &mut *sides[side]);
            removed[side].push(entries as f64 * 1e3 / ns as f64);
        }
    }
    for (hit, found) in HITS.iter().zip(found) {
        rows.push(row(scenario, "match", hit, "us", found.map(median)));
    }
    let speed = "million entries/s";
    rows.push(row(scenario, "store", "", speed, stored.map(median)));
    rows.push(row(scenario, "remove", "", speed, removed.map(median)));
    rows.push(row(scenario, "memory", "", "bytes/entry", memory));
}

fn row(scenario: Scenario, what: &str, hit: &str, unit: &str, values: [f64; 3]) -> Value {
    let mut row = json!({
        "what": what,
        "workers": scenario.workers,
        "blocks": scenario.blocks,
        "holders": scenario.holders,
        "event_blocks": scenario.step,
        "hit": hit,
        "unit": unit,
    });
    for (side, value) in SIDES.iter().zip(values) {
        row[side] = json!(value);
    }
    row
}

/// Prompts whose events are made at once.
fn batches(workload: &Workload) -> impl Iterator<Item = Range<usize>> {
    let Scenario {
        blocks, holders, ..
    } = workload.scenario;
    let prompts = workload.prompts.len();
    let size = (BATCH_BLOCKS / (blocks * holders)).max(1);
    (0..prompts)
        .step_by(size)
        .map(move |from| from..prompts.min(from + size))
}

/// Stores everything; returns nanoseconds.
fn store(workload: &Workload, side: &mut dyn Side, events_at_once: usize) -> u64 {
    let mut total = 0;
    for batch in batches(workload) {
        let events: Vec<_> = batch.flat_map(|prompt| workload.stores(prompt)).collect();
        total += events
            .chunks(events_at_once)
            .map(|events| side.store(events))
            .sum::<u64>();
    }
    total
}

/// Removes everything; returns nanoseconds.
fn remove(workload: &Workload, side: &mut dyn Side) -> u64 {
    batches(workload)
        .map(|batch| {
            let events: Vec<_> = batch.flat_map(|prompt| workload.removals(prompt)).collect();
            side.remove(&events)
        })
        .sum()
}

/// Bytes for each pair of worker and block, and how many pairs. Also checks that all sides answer the same, and that
/// nothing is left when everything was removed.
fn weigh(workload: &Workload, questions: &[Vec<Vec<(u64, u64)>>; 3]) -> ([f64; 3], u64) {
    let workers = workload.scenario.workers;
    let mut entries = 0;
    let mut answers: Vec<Vec<Depths>> = Vec::new();
    let bytes = SIDES.map(|name| {
        count(true);
        let before = live_bytes();
        let (mut side, taken): (Box<dyn Side>, _) = match name {
            "ours" => {
                let mut ours = Ours::new(workers);
                store(workload, &mut ours, WEIGHED_EVENTS);
                entries = ours.entries();
                (Box::new(ours), live_bytes() - before)
            }
            "radix" => weighed(workload, Radix::default(), before),
            _ => weighed(workload, Concurrent::default(), before),
        };
        let asked = questions.iter().flat_map(|asked| asked.iter().take(16));
        let found: Vec<Depths> = asked.map(|question| side.depths(question)).collect();
        remove(workload, &mut *side);
        for question in questions.iter().flatten().take(16) {
            assert!(side.depths(question).is_empty(), "{name} kept something");
        }
        answers.push(found.clone());
        drop(side);
        count(false);
        taken as f64
    });
    assert!(
        answers.iter().all(|found| *found == answers[0]),
        "the sides answer differently"
    );
    (bytes.map(|bytes| bytes / entries as f64), entries)
}

fn weighed<S: Side + 'static>(
    workload: &Workload,
    mut side: S,
    before: usize,
) -> (Box<dyn Side>, usize) {
    store(workload, &mut side, WEIGHED_EVENTS);
    let taken = live_bytes() - before;
    (Box::new(side), taken)
}
