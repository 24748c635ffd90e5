//! Which holder holds which block: runs of consecutive blocks and who holds them. Where all holders of a run hold the
//! same blocks of it, as they mostly do, one bitmap speaks for all; else each has its own.
//!
//! A chained hash names a whole prefix, so a block is found by its hash alone and a run never needs splitting. What
//! keeps it exact: a hash held by anybody sits in exactly one slot, and the table points at it. Which slot only decides
//! how fast a prompt is walked. A slot that nobody holds is zeroed (`NO_BLOCK`) and leaves the table.

use hashbrown::HashTable;
use hashbrown::hash_table;
use smallvec::SmallVec;

use crate::bits::{self, Blocks};
use crate::hash::{NO_BLOCK, spread};
use crate::recency::{Stamp, UNKNOWN};

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
    /// Most runs have few.
    holders: SmallVec<[Holder; 4]>,
    /// When each holder last stored or used any of its blocks here, in the order of `holders`. A prompt is used from its
    /// first block on, so that it is the first blocks that this speaks of where a run holds the ends of several prompts.
    used: SmallVec<[Stamp; 4]>,
    /// Slots that each holder holds, in the order of `holders`; empty: each holds `common`.
    masks: Vec<u64>,
    common: u64,
    /// Where the walk usually goes on after the last slot.
    next: Entry,
    /// When it was last stored to or matched.
    touched: u64,
}

impl Run {
    /// Heap bytes, as asked of the allocator.
    fn bytes(&self) -> usize {
        let holders = match self.holders.spilled() {
            true => self.holders.capacity() * size_of::<Holder>(),
            false => 0,
        };
        let used = match self.used.spilled() {
            true => self.used.capacity() * size_of::<Stamp>(),
            false => 0,
        };
        (self.hashes.capacity() + self.masks.capacity()) * size_of::<u64>() + holders + used
    }

    fn position(&self, holder: Holder) -> Option<usize> {
        // `contains` compares many at once, `position` one by one.
        let chunks = self.holders.chunks(32);
        let (chunk, holders) = chunks
            .enumerate()
            .find(|(_, holders)| holders.contains(&holder))?;
        let within = holders.iter().position(|of| *of == holder)?;
        Some(chunk * 32 + within)
    }

    fn mask(&self, at: usize) -> u64 {
        self.masks.get(at).copied().unwrap_or(self.common)
    }

    /// Slots that anybody holds.
    fn held(&self) -> u64 {
        if self.holders.is_empty() {
            return 0;
        }
        match self.masks.is_empty() {
            true => self.common,
            false => self.masks.iter().fold(0, |all, mask| all | mask),
        }
    }

    /// Returns the slots that were not held, and whether the holder is new to the run. Slots of `moved` are only held
    /// otherwise than before, since `before`: that is no use of them.
    fn set(
        &mut self,
        holder: Holder,
        mask: u64,
        (moved, before): (u64, Stamp),
        now: Stamp,
    ) -> (u64, bool) {
        if let Some(at) = self.position(holder) {
            let held = self.mask(at);
            let used = match mask & !held & !moved {
                0 => before,
                _ => now.max(before),
            };
            self.used[at] = self.used[at].max(used);
            if mask & !held != 0 {
                self.put(at, held | mask);
            }
            return (mask & !held, false);
        }
        self.used.push(match mask & !moved {
            0 => before,
            _ => now.max(before),
        });
        if self.holders.is_empty() {
            self.common = mask;
        } else if self.masks.is_empty() && mask != self.common {
            self.split();
        }
        self.holders.push(holder);
        if !self.masks.is_empty() {
            // They differed before, so that they differ now.
            self.masks.push(mask);
        }
        (mask, true)
    }

    /// Returns the slots that were held, and whether the holder has none left.
    fn unset(&mut self, at: usize, mask: u64) -> (u64, bool) {
        let held = self.mask(at);
        let gone = held & mask;
        if gone == held {
            self.holders.swap_remove(at);
            self.used.swap_remove(at);
            if !self.masks.is_empty() {
                self.masks.swap_remove(at);
                self.join();
            }
            return (gone, true);
        }
        if gone != 0 {
            self.put(at, held & !mask);
        }
        (gone, false)
    }

    fn put(&mut self, at: usize, mask: u64) {
        if self.holders.len() == 1 {
            self.common = mask;
            return;
        }
        if self.masks.is_empty() {
            self.split();
        }
        self.masks[at] = mask;
        self.join();
    }

    fn split(&mut self) {
        self.masks = vec![self.common; self.holders.len()];
    }

    fn join(&mut self) {
        let [first, .., last] = self.masks[..] else {
            if let [only] = self.masks[..] {
                self.common = only;
                self.masks = Vec::new();
            }
            return;
        };
        // The ends differ while holders go through the same change one after the other.
        if first == last && self.masks.iter().all(|mask| *mask == first) {
            self.common = first;
            self.masks = Vec::new();
        }
    }
}

struct Holdings {
    blocks: u64,
    /// Runs where it holds something now.
    live: usize,
    /// Those and some where it did: stale and double entries are weeded out as it grows.
    runs: Vec<u32>,
    /// Where the last block that it stored lay: what it stores next usually follows.
    last: u32,
}

impl Default for Holdings {
    fn default() -> Self {
        Holdings {
            blocks: 0,
            live: 0,
            runs: Vec::new(),
            last: NOWHERE,
        }
    }
}

/// A stretch of a prompt that lies in one run.
struct Segment {
    run: u32,
    slot: usize,
    blocks: usize,
}

/// What the table holds of a block: where it lies, and part of its hash, so that a table that grows needs no look at
/// the blocks.
#[derive(Clone, Copy)]
struct Entry {
    place: u32,
    tag: u32,
}

impl Default for Entry {
    fn default() -> Self {
        Entry {
            place: NOWHERE,
            tag: 0,
        }
    }
}

impl Entry {
    fn key(&self) -> u64 {
        key(self.tag)
    }
}

fn tag(hash: u64) -> u32 {
    (spread(hash) >> 32) as u32
}

/// The table's own hash: it looks at the high bits and the low ones.
fn key(tag: u32) -> u64 {
    spread(u64::from(tag))
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
    table: HashTable<Entry>,
    runs: Vec<Run>,
    free_runs: Vec<u32>,
    holders: Vec<Holdings>,
    entries: u64,
    clock: u64,
    /// The time of the holds to come.
    now: Stamp,
    /// Bytes of the runs' own vectors.
    run_bytes: usize,
}

/// What one holder holds of a prompt.
#[derive(Clone, Copy)]
struct Met {
    /// Blocks from the first on.
    prefix: usize,
    /// Where the bits of the blocks behind a hole begin, or NOWHERE.
    bits: u32,
}

/// Blocks of a prompt that lie one behind the other in one run, and that somebody holds.
struct Stretch {
    first: u32,
    blocks: u32,
    /// Of the first.
    place: u32,
}

/// What a prompt finds: the holders of any of its blocks, and which blocks.
#[derive(Default)]
pub struct Found {
    words: usize,
    /// By holder: position in `met`, or NOWHERE.
    position: Vec<u32>,
    holders: Vec<Holder>,
    met: Vec<Met>,
    bits: Vec<u64>,
    stretches: Vec<Stretch>,
}

impl Found {
    /// Where a block of the prompt lies that somebody holds.
    pub fn place(&self, block: u64) -> Option<u32> {
        let after = self
            .stretches
            .partition_point(|stretch| u64::from(stretch.first) <= block);
        let stretch = self.stretches.get(after.checked_sub(1)?)?;
        let within = block as u32 - stretch.first;
        (within < stretch.blocks).then_some(stretch.place + within)
    }

    /// Who holds any block of the prompt, in no order.
    pub fn holders(&self) -> &[Holder] {
        &self.holders
    }

    /// Each of them with the blocks that it holds from the first on.
    pub fn prefixes(&self) -> impl Iterator<Item = (Holder, u64)> {
        let prefixes = self.met.iter().map(|met| met.prefix as u64);
        self.holders.iter().copied().zip(prefixes)
    }

    /// Which blocks of the prompt a holder holds.
    pub fn of(&self, holder: Holder) -> Blocks<'_> {
        let at = self.position.get(holder as usize);
        let Some(met) = at.and_then(|&at| self.met.get(at as usize)) else {
            return Blocks::default();
        };
        let bits = match met.bits {
            NOWHERE => &[][..],
            start => &self.bits[start as usize..][..self.words],
        };
        Blocks {
            prefix: met.prefix as u64,
            bits,
        }
    }

    fn reset(&mut self, blocks: usize, holders: usize) {
        for holder in self.holders.drain(..) {
            self.position[holder as usize] = NOWHERE;
        }
        self.position.resize(holders, NOWHERE);
        self.met.clear();
        self.bits.clear();
        self.stretches.clear();
        // One word more, so that a stretch may straddle the end.
        self.words = blocks.div_ceil(64) + 1;
    }

    fn meet(&mut self, holder: Holder) -> usize {
        let position = &mut self.position[holder as usize];
        if *position == NOWHERE {
            *position = self.met.len() as u32;
            self.holders.push(holder);
            self.met.push(Met {
                prefix: 0,
                bits: NOWHERE,
            });
        }
        *position as usize
    }

    /// All of `holders` hold blocks `at..at + blocks`.
    fn add_all(&mut self, holders: &[Holder], at: usize, blocks: usize) {
        if at == 0 && self.holders.is_empty() {
            for (position, &holder) in holders.iter().enumerate() {
                self.position[holder as usize] = position as u32;
            }
            self.holders.extend_from_slice(holders);
            self.met.resize(
                holders.len(),
                Met {
                    prefix: blocks,
                    bits: NOWHERE,
                },
            );
            return;
        }
        for &holder in holders {
            let position = self.meet(holder);
            let met = &mut self.met[position];
            if met.prefix == at && met.bits == NOWHERE {
                met.prefix += blocks;
                continue;
            }
            for from in (0..blocks).step_by(64) {
                let ones = bits::mask(0, (blocks - from).min(64) as u64);
                self.add_bits(position, at + from, ones);
            }
        }
    }

    /// A holder holds the blocks of the low bits of `held`, from block `at` on. Stretches come in order.
    fn add(&mut self, holder: Holder, at: usize, mut held: u64) {
        let position = self.meet(holder);
        let met = &mut self.met[position];
        if met.prefix == at && met.bits == NOWHERE {
            let ones = held.trailing_ones();
            met.prefix += ones as usize;
            held &= u64::MAX.checked_shl(ones).unwrap_or(0);
        }
        if held != 0 {
            self.add_bits(position, at, held);
        }
    }

    fn add_bits(&mut self, position: usize, at: usize, held: u64) {
        let met = &mut self.met[position];
        if met.bits == NOWHERE {
            met.bits = self.bits.len() as u32;
            self.bits.resize(self.bits.len() + self.words, 0);
        }
        let start = met.bits as usize;
        bits::copy(&mut self.bits[start..start + self.words], at, held);
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

    /// The time of the holds to come.
    pub fn set_time(&mut self, now: Stamp) {
        self.now = now;
    }

    /// Who holds the block at a place of `Found`, and when each last used it, or one that follows or precedes it closely.
    pub fn each_holder_at(&self, place: u32, mut each: impl FnMut(Holder, Stamp)) {
        let (run, slot) = unpack(place);
        let run = &self.runs[run as usize];
        let holders = run.holders.iter().zip(&run.used);
        if run.masks.is_empty() {
            if run.common >> slot & 1 == 1 {
                holders.for_each(|(holder, used)| each(*holder, *used));
            }
            return;
        }
        for ((holder, used), mask) in holders.zip(&run.masks) {
            if mask >> slot & 1 == 1 {
                each(*holder, *used);
            }
        }
    }

    /// When a holder last used the block at a place, if it holds it.
    pub fn used(&self, holder: Holder, place: u32) -> Option<Stamp> {
        let (run, slot) = unpack(place);
        let run = &self.runs[run as usize];
        let at = run.position(holder)?;
        (run.mask(at) >> slot & 1 == 1).then(|| run.used[at])
    }

    /// The stretches of a prompt that lie in one run each, up to the first block that nobody holds: how many blocks, and
    /// the place of the last.
    pub fn stretches(&self, hashes: &[u64]) -> Vec<(u64, u32)> {
        let mut stretches = Vec::new();
        let mut at = 0;
        let mut before = NOWHERE;
        while at < hashes.len() {
            let Some(segment) = self.find(hashes, at, before) else {
                break;
            };
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            stretches.push((segment.blocks as u64, before));
            at += segment.blocks;
        }
        stretches
    }

    /// These holders use what they hold of these blocks.
    pub fn touch(&mut self, holders: &[Holder], hashes: &[u64]) {
        let mut at = 0;
        let mut before = NOWHERE;
        while at < hashes.len() {
            let Some(segment) = self.find(hashes, at, before) else {
                return;
            };
            let mask = bits::mask(segment.slot as u64, (segment.slot + segment.blocks) as u64);
            let run = &mut self.runs[segment.run as usize];
            for holder in holders {
                let Some(position) = run.position(*holder) else {
                    continue;
                };
                if run.mask(position) & mask != 0 {
                    run.used[position] = run.used[position].max(self.now);
                }
            }
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
    }

    /// `holder` holds the blocks and `instead` doesn't; returns how many `holder` did not hold before.
    pub fn hold(&mut self, holder: Holder, instead: Holder, parent: u64, hashes: &[u64]) -> u64 {
        self.clock += 1;
        let mut new = 0;
        let mut at = 0;
        let mut before = self.behind(holder, parent);
        while at < hashes.len() {
            let segment = match self.find(hashes, at, before) {
                Some(segment) => segment,
                None => {
                    if at == 0 && before == NOWHERE {
                        before = self.place(parent).unwrap_or(NOWHERE);
                    }
                    self.add(hashes, at, before)
                }
            };
            let mask = bits::mask(segment.slot as u64, (segment.slot + segment.blocks) as u64);
            self.runs[segment.run as usize].touched = self.clock;
            let moved = match self.holders[instead as usize].live {
                0 => (0, UNKNOWN),
                _ => self.unset(segment.run, instead, mask),
            };
            new += self.set(segment.run, holder, mask, moved);
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
        self.holders[holder as usize].last = before;
        new
    }

    /// Where `parent` lies, if it is what the holder stored last.
    fn behind(&self, holder: Holder, parent: u64) -> u32 {
        let last = self.holders[holder as usize].last;
        match parent != NO_BLOCK && self.hash_at(last) == parent {
            true => last,
            false => NOWHERE,
        }
    }

    /// Neither of the two holders holds the blocks; returns how many were held by either.
    pub fn drop(&mut self, holders: [Holder; 2], hashes: &[u64]) -> u64 {
        self.drop_telling(holders, &[], hashes, &mut Vec::new())
    }

    /// `drop`; `lost` hears when the blocks were last used that none of `others` holds, once for each run.
    pub fn drop_telling(
        &mut self,
        holders: [Holder; 2],
        others: &[Holder],
        hashes: &[u64],
        lost: &mut Vec<Stamp>,
    ) -> u64 {
        let mut dropped = 0;
        let mut at = 0;
        let mut before = NOWHERE;
        let (mut run, mut mask) = (NOWHERE, 0);
        while at < hashes.len() {
            let Some(mut segment) = self.find(hashes, at, before) else {
                before = NOWHERE;
                at += 1;
                continue;
            };
            if segment.run != run {
                dropped += self.drop_slots(holders, others, run, mask, lost);
                (run, mask) = (segment.run, 0);
            }
            at += segment.blocks;
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            if segment.blocks == 1 {
                // Engines evict from the end.
                let slots = self.runs[run as usize].hashes[..segment.slot].iter().rev();
                let same = slots.zip(&hashes[at..]);
                let back = same
                    .take_while(|(slot, hash)| slot == hash && **slot != NO_BLOCK)
                    .count();
                segment.slot -= back;
                segment.blocks += back;
                at += back;
                before -= back as u32;
            }
            mask |= bits::mask(segment.slot as u64, (segment.slot + segment.blocks) as u64);
        }
        dropped + self.drop_slots(holders, others, run, mask, lost)
    }

    fn drop_slots(
        &mut self,
        holders: [Holder; 2],
        others: &[Holder],
        run: u32,
        mask: u64,
        lost: &mut Vec<Stamp>,
    ) -> u64 {
        if mask == 0 {
            return 0;
        }
        let (mut gone, mut used) = (0, UNKNOWN);
        for holder in holders {
            if self.holders[holder as usize].live > 0 {
                let (slots, last) = self.unset(run, holder, mask);
                gone |= slots;
                used = used.max(last);
            }
        }
        if used != UNKNOWN {
            let run = &self.runs[run as usize];
            let kept = others.iter().filter_map(|other| run.position(*other));
            if gone & !kept.fold(0, |kept, at| kept | run.mask(at)) != 0 {
                lost.push(used);
            }
        }
        self.sweep(run, gone);
        u64::from(gone.count_ones())
    }

    /// The holder holds nothing; returns how many blocks it held.
    pub fn clear(&mut self, holder: Holder) -> u64 {
        let held = self.holders[holder as usize].blocks;
        for run in std::mem::take(&mut self.holders[holder as usize].runs) {
            let (gone, _) = self.unset(run, holder, u64::MAX);
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
            let mask = run.position(holder).map_or(0, |at| run.mask(at));
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
        // Blocks `from..at` lie in runs with the same holders as `stretch`, who hold all of them.
        let (mut stretch, mut from) = (NOWHERE, 0);
        while at < hashes.len() {
            let segment = self.find(hashes, at, before);
            let run = segment.as_ref().map(|segment| segment.run);
            if stretch != NOWHERE && !run.is_some_and(|run| self.alike(stretch, run)) {
                let holders = &self.runs[stretch as usize].holders;
                found.add_all(holders, from, at - from);
                stretch = NOWHERE;
            }
            let Some(segment) = segment else {
                if !go_on(at) {
                    break;
                }
                before = NOWHERE;
                at += 1;
                continue;
            };
            let place = pack(segment.run, segment.slot);
            found.stretches.push(Stretch {
                first: at as u32,
                blocks: segment.blocks as u32,
                place,
            });
            let run = &mut self.runs[segment.run as usize];
            run.touched = self.clock;
            if run.masks.is_empty() {
                if stretch == NOWHERE {
                    (stretch, from) = (segment.run, at);
                }
            } else {
                let ones = bits::mask(0, segment.blocks as u64);
                for (&holder, mask) in run.holders.iter().zip(&run.masks) {
                    let held = mask >> segment.slot & ones;
                    if held != 0 {
                        found.add(holder, at, held);
                    }
                }
            }
            before = pack(segment.run, segment.slot + segment.blocks - 1);
            at += segment.blocks;
        }
        if stretch != NOWHERE {
            found.add_all(&self.runs[stretch as usize].holders, from, at - from);
        }
    }

    /// All holders of the one hold all of either run.
    fn alike(&self, one: u32, other: u32) -> bool {
        let (run, other_run) = (&self.runs[one as usize], &self.runs[other as usize]);
        one == other || other_run.masks.is_empty() && run.holders == other_run.holders
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
            let mut gone = 0;
            while let Some(&holder) = self.runs[run as usize].holders.last() {
                gone |= self.unset(run, holder, u64::MAX).0;
                losers.push(holder);
            }
            self.sweep(run, gone);
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
        let tag = tag(hash);
        let same = |entry: &Entry| entry.tag == tag && self.hash_at(entry.place) == hash;
        self.table.find(key(tag), same).map(|entry| entry.place)
    }

    /// The stretch of `hashes` from `at` on that lies in one run, if the first is held. `before` is where the block
    /// before it lies, if known.
    fn find(&self, hashes: &[u64], at: usize, before: u32) -> Option<Segment> {
        let hash = hashes[at];
        if hash == NO_BLOCK {
            return None;
        }
        let (run, slot) = unpack(match self.near(hash, before) {
            Some(place) => place,
            None => self.place(hash)?,
        });
        let run_of = &self.runs[run as usize];
        let slots = &run_of.hashes[slot..];
        let mut blocks = bits::same(slots, &hashes[at..]);
        // A slot that nobody holds is zero, and no block, even if the prompt says so.
        if run_of.masks.is_empty() {
            blocks = blocks.min((run_of.common >> slot).trailing_ones() as usize);
        } else if slots[..blocks].contains(&NO_BLOCK) {
            let held = slots.iter().take_while(|slot| **slot != NO_BLOCK);
            blocks = held.count();
        }
        Some(Segment { run, slot, blocks })
    }

    /// Where a block lies, if at one of the places worth a look before the table.
    fn near(&self, hash: u64, before: u32) -> Option<u32> {
        if before == NOWHERE {
            return None;
        }
        let (run, slot) = unpack(before);
        let Run { hashes, next, .. } = &self.runs[run as usize];
        if hashes.get(slot + 1) == Some(&hash) {
            return Some(before + 1);
        }
        if slot > 0 && hashes.get(slot - 1) == Some(&hash) {
            return Some(before - 1);
        }
        let follows = next.tag == tag(hash) && self.hash_at(next.place) == hash;
        follows.then_some(next.place)
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
                self.runs[unpack(before).0 as usize].next = Entry {
                    place: pack(run, 0),
                    tag: tag(hashes[at]),
                };
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
            let tag = tag(hash);
            let entry = self.table.entry(
                key(tag),
                |entry| {
                    let (run, slot) = unpack(entry.place);
                    entry.tag == tag && self.runs[run as usize].hashes[slot] == hash
                },
                Entry::key,
            );
            let hash_table::Entry::Vacant(vacant) = entry else {
                break;
            };
            vacant.insert(Entry {
                place: pack(run, place),
                tag,
            });
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
            touched: self.clock,
            ..Run::default()
        };
        run
    }

    /// No more runs can be named.
    pub fn is_full(&self) -> bool {
        self.runs() >= MAX_RUNS
    }

    fn set(&mut self, run: u32, holder: Holder, mask: u64, moved: (u64, Stamp)) -> u64 {
        let slots = &mut self.runs[run as usize];
        let before = slots.bytes();
        let (new, joined) = slots.set(holder, mask, moved, self.now);
        self.run_bytes = self.run_bytes + slots.bytes() - before;
        if joined {
            self.list(run, holder);
        }
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
            holdings
                .runs
                .retain(|&run| runs[run as usize].position(holder).is_some());
        }
    }

    /// Returns the bits that were set, and when they were last used if there were any.
    fn unset(&mut self, run: u32, holder: Holder, mask: u64) -> (u64, Stamp) {
        let slots = &mut self.runs[run as usize];
        let Some(at) = slots.position(holder) else {
            return (0, UNKNOWN);
        };
        let used = slots.used[at];
        let before = slots.bytes();
        let (gone, left) = slots.unset(at, mask);
        self.run_bytes = self.run_bytes + slots.bytes() - before;
        let count = u64::from(gone.count_ones());
        let holdings = &mut self.holders[holder as usize];
        holdings.blocks -= count;
        holdings.live -= usize::from(left);
        self.entries -= count;
        match gone {
            0 => (0, UNKNOWN),
            _ => (gone, used),
        }
    }

    /// Frees the slots of `gone` that nobody holds now.
    fn sweep(&mut self, run: u32, gone: u64) {
        if gone == 0 {
            return;
        }
        let held = self.runs[run as usize].held();
        let mut free = gone & !held;
        while free != 0 {
            let slot = free.trailing_zeros() as usize;
            free &= free - 1;
            let place = pack(run, slot);
            let hash = self.hash_at(place);
            let found = self
                .table
                .find_entry(key(tag(hash)), |entry| entry.place == place);
            if let Ok(entry) = found {
                entry.remove();
            }
            self.runs[run as usize].hashes[slot] = NO_BLOCK;
        }
        let slots = &mut self.runs[run as usize];
        slots.hashes.truncate(64 - held.leading_zeros() as usize);
        if held == 0 {
            self.run_bytes -= slots.bytes();
            *slots = Run::default();
            self.free_runs.push(run);
        }
    }
}
