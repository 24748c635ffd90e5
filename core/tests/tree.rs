//! The tree against sets, to the bit: runs that are shared, split, torn and joined again, across their borders.

use std::collections::{BTreeMap, BTreeSet};

use _native::tree::{Found, Holder, Tree};

/// Numbers that repeat from run to run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) % end as u64) as usize
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

const HOLDERS: usize = 40;
/// A holder of nothing.
const NOBODY: Holder = HOLDERS as Holder;
/// Where branches leave the stem, and how long prompts are: around the borders of runs of 64 blocks.
const FORKS: [usize; 6] = [0, 5, 63, 64, 65, 128];
const LENGTHS: [usize; 9] = [1, 6, 63, 64, 65, 127, 129, 192, 210];

fn prompt(fork: usize, length: usize) -> Vec<u64> {
    let branch = |at| if at < fork { 0 } else { fork as u64 + 1 };
    (0..length)
        .map(|at| mix(branch(at) << 32 | at as u64))
        .collect()
}

struct Pair {
    tree: Tree,
    found: Found,
    model: BTreeMap<Holder, BTreeSet<u64>>,
}

impl Pair {
    fn new() -> Pair {
        let mut tree = Tree::default();
        let model = (0..=HOLDERS).map(|_| (tree.add_holder(), BTreeSet::new()));
        Pair {
            model: model.collect(),
            tree,
            found: Found::default(),
        }
    }

    fn hold(&mut self, holder: Holder, instead: Holder, parent: u64, hashes: &[u64]) {
        let held = self.model.get_mut(&holder).expect("known");
        let before = held.len();
        held.extend(hashes);
        let new = (held.len() - before) as u64;
        let other = self.model.get_mut(&instead).expect("known");
        other.retain(|hash| !hashes.contains(hash));
        assert_eq!(self.tree.hold(holder, instead, parent, hashes), new);
    }

    fn drop(&mut self, holders: [Holder; 2], hashes: &[u64]) {
        let mut dropped = BTreeSet::new();
        for holder in holders {
            let held = self.model.get_mut(&holder).expect("known");
            dropped.extend(held.iter().filter(|hash| hashes.contains(hash)).copied());
            held.retain(|hash| !hashes.contains(hash));
        }
        assert_eq!(self.tree.drop(holders, hashes), dropped.len() as u64);
    }

    fn clear(&mut self, holder: Holder) {
        let held = self.model.get_mut(&holder).expect("known");
        assert_eq!(self.tree.clear(holder), held.len() as u64);
        held.clear();
    }

    fn evict(&mut self, entries: u64) {
        let before = self.tree.entries();
        let (losers, gone) = self.tree.evict(entries);
        assert_eq!(self.tree.entries(), before - gone);
        assert!(self.tree.entries() <= entries);
        for (&holder, held) in &mut self.model {
            let left: BTreeSet<u64> = self.tree.holdings(holder).into_iter().collect();
            assert!(left.is_subset(held));
            assert_eq!(losers.contains(&holder), left.len() < held.len());
            *held = left;
        }
    }

    fn walk(&mut self, hashes: &[u64]) {
        self.tree.walk(hashes, &mut self.found, |_| true);
        let mut met = 0;
        for (&holder, held) in &self.model {
            let blocks = self.found.of(holder);
            let holds = |at: usize| held.contains(&hashes[at]);
            for at in 0..hashes.len() {
                let bit = blocks.word(at as u64 / 64) >> (at % 64) & 1;
                assert_eq!(bit == 1, holds(at), "holder {holder}, block {at}");
            }
            let past = blocks.word(hashes.len() as u64 / 64) >> (hashes.len() % 64);
            assert_eq!(past, 0, "beyond the prompt");
            let missing = (0..hashes.len()).find(|&at| !holds(at));
            let missing = missing.unwrap_or(hashes.len()) as u64;
            assert_eq!(blocks.first_missing(hashes.len() as u64), missing);
            met += usize::from((0..hashes.len()).any(holds));
        }
        assert_eq!(self.found.holders().len(), met);
    }

    fn check(&self) {
        let mut entries = 0;
        let mut blocks: BTreeSet<&u64> = BTreeSet::new();
        for (&holder, held) in &self.model {
            assert_eq!(self.tree.held(holder), held.len() as u64);
            let mut holdings = self.tree.holdings(holder);
            holdings.sort_unstable();
            assert!(holdings.iter().eq(held), "holder {holder}");
            entries += held.len() as u64;
            blocks.extend(held);
        }
        assert_eq!(self.tree.entries(), entries);
        assert_eq!(self.tree.blocks(), blocks.len());
        assert!(self.tree.runs() <= blocks.len());
    }
}

/// A part of a prompt, mostly in order, sometimes from its end (as engines evict) or scattered.
fn part(numbers: &mut Numbers, prompt: &[u64]) -> (u64, Vec<u64>) {
    let ends = [0, numbers.below(prompt.len() + 1), prompt.len()];
    let mut from = ends[numbers.below(2)];
    let mut to = ends[1 + numbers.below(2)];
    if from > to {
        (from, to) = (to, from);
    }
    let parent = match (from, numbers.below(4)) {
        (0, _) | (_, 0) => 0,
        (_, 1) => 12345,
        _ => prompt[from - 1],
    };
    let mut hashes = prompt[from..to].to_vec();
    match numbers.below(8) {
        0 => hashes.reverse(),
        1 => {
            let step = 1 + numbers.below(3);
            hashes = hashes.into_iter().step_by(step).collect();
        }
        2 => hashes.extend_from_within(..hashes.len() / 2),
        _ => {}
    }
    (parent, hashes)
}

#[test]
fn who_holds_what_is_exact_under_any_order_of_events() {
    for seed in 0..30 {
        let mut numbers = Numbers(seed);
        let mut pair = Pair::new();
        // Few holders tear runs often; many share them.
        let holders = [3, 8, HOLDERS][numbers.below(3)];
        for step in 0..200 {
            let fork = FORKS[numbers.below(FORKS.len())];
            let mut hashes = prompt(fork, LENGTHS[numbers.below(LENGTHS.len())]);
            let holder = numbers.below(holders) as Holder;
            let other = (holder + 1) % holders as Holder;
            match numbers.below(12) {
                0..3 => {
                    let (parent, part) = part(&mut numbers, &hashes);
                    pair.hold(holder, other, parent, &part);
                }
                // All hold the same, one after the other.
                3 => {
                    let (parent, part) = part(&mut numbers, &hashes);
                    for of in 0..holders as Holder {
                        pair.hold(of, NOBODY, parent, &part);
                    }
                }
                // One block after the other, as decoding says it.
                4 => {
                    let mut parent = 0;
                    for &hash in &hashes {
                        pair.hold(holder, other, parent, &[hash]);
                        parent = hash;
                    }
                }
                5 | 6 => {
                    let (_, mut part) = part(&mut numbers, &hashes);
                    part.reverse();
                    if numbers.below(4) == 0 {
                        part.insert(part.len() / 2, 0);
                    }
                    pair.drop([holder, other], &part);
                }
                // All drop the same, from its end.
                7 => {
                    let (_, mut part) = part(&mut numbers, &hashes);
                    part.reverse();
                    for of in 0..holders as Holder {
                        pair.drop([of, of], &part);
                    }
                }
                8 => pair.clear(holder),
                9 => pair.evict(pair.tree.entries() / 4 * 3),
                10 => {
                    let zeroed = numbers.below(hashes.len());
                    hashes[zeroed] = 0;
                }
                _ => {}
            }
            pair.walk(&hashes);
            if step % 10 == 0 {
                pair.check();
            }
        }
        for holder in 0..HOLDERS as Holder {
            pair.clear(holder);
        }
        pair.check();
        assert_eq!(pair.tree.runs(), 0);
    }
}
