//! Which holder holds which block: runs of consecutive blocks, one bitmap for each holder of a run.
//!
//! A chained hash names a whole prefix, so a block is found by its hash alone and a run never needs splitting. What
//! keeps it exact: a hash held by anybody sits in exactly one slot, and the table points at it. Which slot only decides
//! how fast a prompt is walked. A slot that nobody holds is zeroed (`NO_BLOCK`) and leaves the table.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::bits;
use crate::hash::{NO_BLOCK, spread};

const RUN_BLOCKS: usize = 64;
const NOWHERE: u32 = u32::MAX;
/// Runs that a packed place can name; the last is kept free for `NOWHERE`.
const MAX_RUNS: usize = (1 << 26) - 1;

/// Number of a holder.
pub type Holder = u32;

#[derive(Default)]
struct Run {
    /// At most 64; zero where nobody holds the block.
    hashes: Vec<u64>,
    holders: Vec<(Holder, u64)>,
    /// Where the walk usually goes on after the last slot.
    next: u32,
    /// When it was last stored to or matched.
    touched: u64,
}

#[derive(Default)]
struct Holdings {
    blocks: u64,
    /// Runs where it holds something now.
    live: usize,
    /// Those and some where it did: stale and double entries are weeded out as it grows.
    runs: Vec<u32>,
}

/// A stretch of a prompt that lies in one run.
struct Segment {
    run: u32,
    slot: usize,
    blocks: usize,
}

fn pack(run: u32, slot: usize) -> u32 {
    (run << 6) | slot as u32
}

fn unpack(place: u32) -> (u32, usize) {
    (place >> 6, (place & 63) as usize)
}

/// The blocks of one model and who holds them.
#[derive(Default)]
pub struct Tree {
    table: HashTable<u32>,
    runs: Vec<Run>,
    free_runs: Vec<u32>,
    holders: Vec<Holdings>,
    entries: u64,
    clock: u64,
    /// Bytes of the runs' own vectors.
    run_bytes: usize,
}

/// What a prompt finds: the holders of any of its blocks, and which blocks.
#[derive(Default)]
pub struct Found {
    words: usize,
    /// By holder: position in `met`, or NOWHERE.
    position: Vec<u32>,
    met: Vec<Holder>,
    bits: Vec<u64>,
}

impl Found {
    /// Words of bits for each holder.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Which blocks of the prompt a holder holds: empty if none.
    pub fn of(&self, holder: Holder) -> &[u64] {
        match self.position.get(holder as usize) {
            Some(&at) if at != NOWHERE => &self.bits[at as usize * self.words..][..self.words],
            _ => &[],
        }
    }

    fn reset(&mut self, blocks: usize, holders: usize) {
        for holder in self.met.drain(..) {
            self.position[holder as usize] = NOWHERE;
        }
        self.position.resize(holders, NOWHERE);
        self.bits.clear();
        // One word more, so that a stretch may straddle the end.
        self.words = blocks.div_ceil(64) + 1;
    }

    fn add(&mut self, holder: Holder, at: usize, from: u64) {
        let position = &mut self.position[holder as usize];
        if *position == NOWHERE {
            *position = self.met.len() as u32;
            self.met.push(holder);
            self.bits.resize(self.met.len() * self.words, 0);
        }
        let start = *position as usize * self.words;
        bits::copy(&mut self.bits[start..start + self.words], at, from);
    }
}

impl Tree {
    /// A new holder; its number is never reused.
    pub fn add_holder(&mut self) -> Holder {
        self.holders.push(Holdings::default());
        (self.holders.len() - 1) as Holder
    }

    /// Blocks that a holder holds.
    pub fn held(&self, holder: Holder) -> u64 {
        self.holders[holder as usize].blocks
    }

    /// Pairs of a holder and a block.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Blocks that somebody holds.
    pub fn blocks(&self) -> usize {
        self.table.len()
    }

    /// Runs in use.
    pub fn runs(&self) -> usize {
        self.runs.len() - self.free_runs.len()
    }

    /// Heap bytes, as asked of the allocator.
    pub fn memory_bytes(&self) -> usize {
        let lists: usize = self
            .holders
            .iter()
            .map(|holder| holder.runs.capacity() * 4)
            .sum();
        self.table.allocation_size()
            + self.runs.capacity() * size_of::<Run>()
            + self.free_runs.capacity() * 4
            + self.holders.capacity() * size_of::<Holdings>()
            + lists
            + self.run_bytes
    }

    /// `holder` holds the blocks and `instead` doesn't; returns how many `holder` did not hold before.
    pub fn hold(&mut self, holder: Holder, instead: Holder, parent: u64, hashes: &[u64]) -> u64 {
        self.clock += 1;
        let mut new = 0;
        let mut at = 0;
        let mut before = NOWHERE;
        while at < hashes.len() {
            let segment = match self.find(hashes, at, before) {
                Some(segment) => segment,
                None => {
                    if at == 0 {
                        before = self.place(parent).unwrap_or(NOWHERE);
                    }
                    self.add(hashes, at, before)
                }
            };
            let mask = bits::mask(segment.slot as u64, (segment.slot + segment.blocks) as u64);
            self.runs[segment.run as usize].touched = self.clock;
            new += self.set(segment.run, holder, mask);
            self.unset(segment.run, instead, mask);
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
        new
    }

    /// Neither of the two holders holds the blocks; returns how many were held by either.
    pub fn drop(&mut self, holders: [Holder; 2], hashes: &[u64]) -> u64 {
        let mut dropped = 0;
        let mut at = 0;
        let mut before = NOWHERE;
        while at < hashes.len() {
            let Some(segment) = self.find(hashes, at, before) else {
                before = NOWHERE;
                at += 1;
                continue;
            };
            let mask = bits::mask(segment.slot as u64, (segment.slot + segment.blocks) as u64);
            let mut gone = 0;
            for holder in holders {
                gone |= self.unset(segment.run, holder, mask);
            }
            dropped += u64::from(gone.count_ones());
            self.sweep(segment.run, gone);
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
        dropped
    }

    /// The holder holds nothing; returns how many blocks it held.
    pub fn clear(&mut self, holder: Holder) -> u64 {
        let held = self.holders[holder as usize].blocks;
        for run in std::mem::take(&mut self.holders[holder as usize].runs) {
            let gone = self.unset(run, holder, u64::MAX);
            self.sweep(run, gone);
        }
        held
    }

    /// What a holder holds, in no order.
    pub fn holdings(&self, holder: Holder) -> Vec<u64> {
        let mut runs = self.holders[holder as usize].runs.clone();
        runs.sort_unstable();
        runs.dedup();
        let mut hashes = Vec::new();
        for run in runs {
            let run = &self.runs[run as usize];
            let mask = run
                .holders
                .iter()
                .find(|(of, _)| *of == holder)
                .map_or(0, |(_, mask)| *mask);
            let slots = run
                .hashes
                .iter()
                .enumerate()
                .filter(|(slot, _)| mask >> slot & 1 == 1);
            hashes.extend(slots.map(|(_, hash)| *hash));
        }
        hashes
    }

    /// Walks a prompt. `go_on(i)`: block i, which nobody holds, doesn't end the walk.
    pub fn walk(&mut self, hashes: &[u64], found: &mut Found, go_on: impl Fn(usize) -> bool) {
        found.reset(hashes.len(), self.holders.len());
        self.clock += 1;
        let mut at = 0;
        let mut before = NOWHERE;
        while at < hashes.len() {
            let Some(segment) = self.find(hashes, at, before) else {
                if !go_on(at) {
                    break;
                }
                before = NOWHERE;
                at += 1;
                continue;
            };
            let run = &mut self.runs[segment.run as usize];
            run.touched = self.clock;
            let mask = bits::mask(0, segment.blocks as u64);
            for &(holder, held) in &run.holders {
                let held = held >> segment.slot & mask;
                if held != 0 {
                    found.add(holder, at, held);
                }
            }
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
    }

    /// Drops the runs touched longest ago until at most `entries` pairs are left; returns the holders that lost some,
    /// and how many pairs went.
    pub fn evict(&mut self, entries: u64) -> (Vec<Holder>, u64) {
        let mut oldest: Vec<(u64, u32)> = (0..self.runs.len() as u32)
            .filter(|&run| !self.runs[run as usize].hashes.is_empty())
            .map(|run| (self.runs[run as usize].touched, run))
            .collect();
        oldest.sort_unstable();
        let before = self.entries;
        let mut losers = Vec::new();
        for (_, run) in oldest {
            if self.entries <= entries {
                break;
            }
            let holders: Vec<Holder> = self.runs[run as usize]
                .holders
                .iter()
                .map(|(of, _)| *of)
                .collect();
            for holder in holders {
                let gone = self.unset(run, holder, u64::MAX);
                self.sweep(run, gone);
                losers.push(holder);
            }
        }
        losers.sort_unstable();
        losers.dedup();
        (losers, before - self.entries)
    }

    fn hash_at(&self, place: u32) -> u64 {
        let (run, slot) = unpack(place);
        let run = self.runs.get(run as usize);
        run.and_then(|run| run.hashes.get(slot))
            .copied()
            .unwrap_or(NO_BLOCK)
    }

    fn place(&self, hash: u64) -> Option<u32> {
        if hash == NO_BLOCK {
            return None;
        }
        self.table
            .find(spread(hash), |&place| self.hash_at(place) == hash)
            .copied()
    }

    /// The stretch of `hashes` from `at` on that lies in one run, if the first is held. `before` is where the block
    /// before it lies, if known.
    fn find(&self, hashes: &[u64], at: usize, before: u32) -> Option<Segment> {
        let hash = hashes[at];
        if hash == NO_BLOCK {
            return None;
        }
        let place = self
            .after(before)
            .find(|&place| self.hash_at(place) == hash);
        let (run, slot) = unpack(match place {
            Some(place) => place,
            None => self.place(hash)?,
        });
        let slots = &self.runs[run as usize].hashes[slot..];
        let same = slots
            .iter()
            .zip(&hashes[at..])
            .take_while(|(slot, hash)| slot == hash && **slot != NO_BLOCK);
        Some(Segment {
            run,
            slot,
            blocks: same.count(),
        })
    }

    /// Places worth a look before the table.
    fn after(&self, before: u32) -> impl Iterator<Item = u32> + use<> {
        let mut places = [NOWHERE; 2];
        if before != NOWHERE {
            let (run, slot) = unpack(before);
            if slot + 1 < RUN_BLOCKS {
                places[0] = before + 1;
            }
            places[1] = self.runs[run as usize].next;
        }
        places.into_iter().filter(|place| *place != NOWHERE)
    }

    /// Slots for blocks that nobody holds, from `hashes[at]` on, as many as fit behind `before`.
    fn add(&mut self, hashes: &[u64], at: usize, before: u32) -> Segment {
        let (mut run, mut slot) = unpack(before);
        let behind = before != NOWHERE && {
            slot += 1;
            let slots = &self.runs[run as usize].hashes;
            slot < RUN_BLOCKS && (slot == slots.len() || slots.get(slot) == Some(&NO_BLOCK))
        };
        if !behind {
            run = self.new_run(hashes.len() - at);
            slot = 0;
            if before != NOWHERE {
                self.runs[unpack(before).0 as usize].next = pack(run, 0);
            }
        }
        let mut blocks = 0;
        while at + blocks < hashes.len() && slot + blocks < RUN_BLOCKS {
            let hash = hashes[at + blocks];
            let place = slot + blocks;
            let free = self.runs[run as usize]
                .hashes
                .get(place)
                .is_none_or(|slot| *slot == NO_BLOCK);
            if !free || hash == NO_BLOCK {
                break;
            }
            let runs = &self.runs;
            let at_place = |place: &u32| {
                let (run, slot) = unpack(*place);
                runs[run as usize].hashes[slot]
            };
            let entry = self.table.entry(
                spread(hash),
                |p| at_place(p) == hash,
                |p| spread(at_place(p)),
            );
            let Entry::Vacant(vacant) = entry else { break };
            vacant.insert(pack(run, place));
            let slots = &mut self.runs[run as usize].hashes;
            if place == slots.len() {
                let before = slots.capacity();
                slots.push(hash);
                self.run_bytes += (slots.capacity() - before) * 8;
            } else {
                slots[place] = hash;
            }
            blocks += 1;
        }
        Segment { run, slot, blocks }
    }

    fn new_run(&mut self, blocks: usize) -> u32 {
        let run = self.free_runs.pop().unwrap_or_else(|| {
            self.runs.push(Run::default());
            (self.runs.len() - 1) as u32
        });
        let hashes = Vec::with_capacity(blocks.min(RUN_BLOCKS));
        self.run_bytes += hashes.capacity() * 8;
        self.runs[run as usize] = Run {
            hashes,
            holders: Vec::new(),
            next: NOWHERE,
            touched: self.clock,
        };
        run
    }

    /// No more runs can be named.
    pub fn is_full(&self) -> bool {
        self.runs() >= MAX_RUNS
    }

    fn set(&mut self, run: u32, holder: Holder, mask: u64) -> u64 {
        let holders = &mut self.runs[run as usize].holders;
        let new = match holders.iter_mut().find(|(of, _)| *of == holder) {
            Some((_, held)) => {
                let new = mask & !*held;
                *held |= mask;
                new
            }
            None => {
                let before = holders.capacity();
                if holders.len() < 4 {
                    holders.reserve_exact(1);
                }
                holders.push((holder, mask));
                self.run_bytes += (holders.capacity() - before) * size_of::<(Holder, u64)>();
                self.list(run, holder);
                mask
            }
        };
        let new = u64::from(new.count_ones());
        self.holders[holder as usize].blocks += new;
        self.entries += new;
        new
    }

    fn list(&mut self, run: u32, holder: Holder) {
        let holdings = &mut self.holders[holder as usize];
        holdings.live += 1;
        holdings.runs.push(run);
        if holdings.runs.len() > 2 * holdings.live + 64 {
            let runs = &self.runs;
            holdings.runs.sort_unstable();
            holdings.runs.dedup();
            holdings.runs.retain(|&run| {
                runs[run as usize]
                    .holders
                    .iter()
                    .any(|(of, _)| *of == holder)
            });
        }
    }

    /// Returns the bits that were set.
    fn unset(&mut self, run: u32, holder: Holder, mask: u64) -> u64 {
        let holders = &mut self.runs[run as usize].holders;
        let Some(at) = holders.iter().position(|(of, _)| *of == holder) else {
            return 0;
        };
        let gone = holders[at].1 & mask;
        holders[at].1 &= !mask;
        let count = u64::from(gone.count_ones());
        let holdings = &mut self.holders[holder as usize];
        holdings.blocks -= count;
        self.entries -= count;
        if holders[at].1 == 0 {
            holders.swap_remove(at);
            holdings.live -= 1;
        }
        gone
    }

    /// Frees the slots of `gone` that nobody holds now.
    fn sweep(&mut self, run: u32, gone: u64) {
        let held = self.runs[run as usize]
            .holders
            .iter()
            .fold(0, |all, (_, held)| all | held);
        let mut free = gone & !held;
        while free != 0 {
            let slot = free.trailing_zeros() as usize;
            free &= free - 1;
            let place = pack(run, slot);
            let hash = self.hash_at(place);
            if let Ok(entry) = self.table.find_entry(spread(hash), |&at| at == place) {
                entry.remove();
            }
            self.runs[run as usize].hashes[slot] = NO_BLOCK;
        }
        let slots = &mut self.runs[run as usize];
        let end = 64 - held.leading_zeros() as usize;
        slots.hashes.truncate(end);
        if end == 0 && gone != 0 {
            self.run_bytes -=
                slots.hashes.capacity() * 8 + slots.holders.capacity() * size_of::<(Holder, u64)>();
            *slots = Run {
                next: NOWHERE,
                ..Run::default()
            };
            self.free_runs.push(run);
        }
    }
}
