//! What was dispatched and is not yet confirmed: counts by block and rank, kept beside the tree.

use std::collections::HashMap;
use std::ops::Range;

use hashbrown::HashTable;

use crate::hash::spread;
use crate::recency::{Stamp, UNKNOWN};

/// What open credits say of one block on one rank.
pub struct Cover {
    /// The rank's slot.
    pub rank: u32,
    /// Open credits that named the block, superseded or not.
    named: u32,
    /// Credits that count in attention lanes.
    pub attention: u32,
    /// Credits that count in window and recurrent lanes.
    pub state: u32,
    /// Credits that may count there.
    pub possible: u32,
    /// When a HOLD superseded the credits opened before.
    superseded: u64,
    /// When the last of them all will be used.
    pub used: Stamp,
}

struct Block {
    hash: u64,
    covers: Vec<Cover>,
}

struct Credit {
    rank: u32,
    hashes: Box<[u64]>,
    /// Blocks that count in window and recurrent lanes; those before may.
    state: Range<usize>,
    opened: u64,
}

/// The open credits of one model.
#[derive(Default)]
pub struct Credits {
    open: HashMap<String, Credit>,
    blocks: HashTable<Block>,
    /// Counts openings and supersessions, to tell which came first.
    clock: u64,
}

impl Credits {
    /// `used`: when the blocks will be. False: a credit of that name is open already.
    pub fn open(
        &mut self,
        decision: &str,
        rank: u32,
        hashes: Vec<u64>,
        state: Range<usize>,
        used: Stamp,
    ) -> bool {
        if self.open.contains_key(decision) {
            return false;
        }
        self.clock += 1;
        for (at, &hash) in hashes.iter().enumerate() {
            let key = spread(hash);
            let block = self
                .blocks
                .entry(key, |block| block.hash == hash, |block| spread(block.hash))
                .or_insert_with(|| Block {
                    hash,
                    covers: Vec::with_capacity(1),
                })
                .into_mut();
            let known = block.covers.iter().position(|cover| cover.rank == rank);
            let known = known.unwrap_or_else(|| {
                block.covers.push(Cover {
                    rank,
                    named: 0,
                    attention: 0,
                    state: 0,
                    possible: 0,
                    superseded: 0,
                    used: UNKNOWN,
                });
                block.covers.len() - 1
            });
            let cover = &mut block.covers[known];
            cover.used = cover.used.max(used);
            cover.named += 1;
            cover.attention += 1;
            cover.state += u32::from(state.contains(&at));
            cover.possible += u32::from(at < state.end);
        }
        let hashes = hashes.into_boxed_slice();
        let credit = Credit {
            rank,
            hashes,
            state,
            opened: self.clock,
        };
        self.open.insert(decision.to_owned(), credit);
        true
    }

    /// The rank whose credit ended, if it was open.
    pub fn close(&mut self, decision: &str) -> Option<u32> {
        let credit = self.open.remove(decision)?;
        for (at, &hash) in credit.hashes.iter().enumerate() {
            let found = self
                .blocks
                .find_entry(spread(hash), |block| block.hash == hash);
            let Ok(mut entry) = found else { continue };
            let covers = &mut entry.get_mut().covers;
            let Some(known) = covers.iter().position(|cover| cover.rank == credit.rank) else {
                continue;
            };
            let cover = &mut covers[known];
            cover.named -= 1;
            if cover.superseded < credit.opened {
                cover.attention -= 1;
                cover.state -= u32::from(credit.state.contains(&at));
                cover.possible -= u32::from(at < credit.state.end);
            }
            if cover.named == 0 {
                covers.swap_remove(known);
                if covers.is_empty() {
                    entry.remove();
                }
            }
        }
        Some(credit.rank)
    }

    /// Ends every credit of a rank; returns how many.
    pub fn close_rank(&mut self, rank: u32) -> usize {
        let of_rank = self.open.iter().filter(|(_, credit)| credit.rank == rank);
        let names: Vec<String> = of_rank.map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.close(name);
        }
        names.len()
    }

    /// The engine itself has spoken of this block.
    pub fn supersede(&mut self, rank: u32, hash: u64) {
        let found = self
            .blocks
            .find_mut(spread(hash), |block| block.hash == hash);
        let Some(block) = found else { return };
        if let Some(cover) = block.covers.iter_mut().find(|cover| cover.rank == rank) {
            self.clock += 1;
            cover.superseded = self.clock;
            cover.attention = 0;
            cover.state = 0;
            cover.possible = 0;
        }
    }

    /// What open credits say of a block. None: no open credit names it, nor any block after it.
    pub fn covers(&self, hash: u64) -> Option<&[Cover]> {
        let found = self.blocks.find(spread(hash), |block| block.hash == hash);
        found.map(|block| block.covers.as_slice())
    }

    /// Open credits.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// No credit is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Heap bytes, about.
    pub fn memory_bytes(&self) -> usize {
        let named: usize = self.open.values().map(|credit| credit.hashes.len()).sum();
        self.open.capacity() * (size_of::<String>() + size_of::<Credit>())
            + self.blocks.allocation_size()
            + self.blocks.len() * size_of::<Cover>()
            + named * size_of::<u64>()
    }
}
