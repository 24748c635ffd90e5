//! Canonical blocks that placed units cover, how surely each lane holds them, and the deltas that tell it.

use hashbrown::HashTable;

use super::units::Level;
use crate::hash::{NO_BLOCK, spread};

/// Hashes in one delta at most.
pub const MAX_HASHES: usize = 65_536;

/// What a delta does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The blocks are held, with this confidence.
    Hold = 1,
    /// They are not held.
    Drop = 2,
    /// Nothing is held in the lane.
    Clear = 3,
}

/// A change of absolute presence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// What it does.
    pub op: Op,
    /// Lane number.
    pub lane: u8,
    /// 1 confirmed, 2 upper.
    pub confidence: u8,
    /// Hash of the block before the first; 0: root or unknown.
    pub parent: u64,
    /// Consecutive blocks where `op` is Hold.
    pub hashes: Vec<u64>,
}

/// Copies of a block, by how sure they are, in one lane: from as many engine hashes as cover it.
#[derive(Clone, Copy, Debug)]
struct Support {
    lane: u8,
    confirmed: u32,
    upper: u32,
}

/// A canonical block.
#[derive(Debug)]
pub struct Node {
    /// Its hash.
    pub hash: u64,
    /// Hash of the block before; 0 for the first.
    pub parent: u64,
    /// Blocks before it.
    pub depth: u32,
    /// Units that cover it.
    uses: u32,
    support: Vec<Support>,
}

impl Node {
    /// How surely a lane holds it.
    pub fn level(&self, lane: u8) -> Level {
        match self.support.iter().find(|support| support.lane == lane) {
            Some(support) if support.confirmed > 0 => Level::Confirmed,
            Some(_) => Level::Upper,
            None => Level::None,
        }
    }

    /// Lanes that hold it, and how surely.
    pub fn levels(&self) -> impl Iterator<Item = (u8, Level)> {
        self.support
            .iter()
            .map(|support| (support.lane, self.level(support.lane)))
    }
}

struct Change {
    lane: u8,
    node: u32,
    before: Level,
}

/// All canonical blocks that some unit covers.
#[derive(Default)]
pub struct Nodes {
    slots: Vec<Option<Node>>,
    free: Vec<u32>,
    table: HashTable<u32>,
    /// Levels before the first change of this event.
    changes: Vec<Change>,
}

impl Nodes {
    /// A node that is known to exist.
    pub fn get(&self, node: u32) -> Option<&Node> {
        self.slots.get(node as usize)?.as_ref()
    }

    fn get_mut(&mut self, node: u32) -> Option<&mut Node> {
        self.slots.get_mut(node as usize)?.as_mut()
    }

    /// By canonical hash.
    pub fn find(&self, hash: u64) -> Option<&Node> {
        self.get(self.at(hash)?)
    }

    /// By canonical hash, its number.
    pub fn at(&self, hash: u64) -> Option<u32> {
        let same = |&at: &u32| self.get(at).is_some_and(|node| node.hash == hash);
        self.table.find(spread(hash), same).copied()
    }

    /// One more unit covers a block that is known to exist.
    pub fn keep(&mut self, at: u32) {
        if let Some(node) = self.get_mut(at) {
            node.uses += 1;
        }
    }

    /// Every node.
    pub fn iter(&self) -> impl Iterator<Item = &Node> {
        self.slots.iter().flatten()
    }

    /// One more unit covers the block.
    pub fn acquire(&mut self, hash: u64, parent: u64, depth: u32) -> u32 {
        let slots = &self.slots;
        let hash_of = |at: u32| {
            slots
                .get(at as usize)
                .and_then(Option::as_ref)
                .map_or(0, |node| node.hash)
        };
        if let Some(&at) = self.table.find(spread(hash), |&at| hash_of(at) == hash) {
            if let Some(node) = self.get_mut(at) {
                node.uses += 1;
            }
            return at;
        }
        let at = self.free.pop().unwrap_or(self.slots.len() as u32);
        self.table
            .insert_unique(spread(hash), at, |&at| spread(hash_of(at)));
        let parent = if depth == 0 { NO_BLOCK } else { parent };
        let node = Some(Node {
            hash,
            parent,
            depth,
            uses: 1,
            support: Vec::new(),
        });
        match self.slots.get_mut(at as usize) {
            Some(slot) => *slot = node,
            None => self.slots.push(node),
        }
        at
    }

    /// One unit less covers the block; it holds no copy of it.
    pub fn release(&mut self, at: u32) {
        let Some(node) = self.get_mut(at) else { return };
        node.uses -= 1;
        if node.uses > 0 {
            return;
        }
        let key = spread(node.hash);
        if let Ok(entry) = self.table.find_entry(key, |&other| other == at) {
            entry.remove();
        }
        self.slots[at as usize] = None;
        self.free.push(at);
    }

    /// A unit that covers the block went from one level to another in a lane.
    pub fn shift(&mut self, at: u32, lane: u8, from: Level, to: Level) {
        let Some(node) = self.get_mut(at) else { return };
        if from == to {
            return;
        }
        let before = node.level(lane);
        let known = node.support.iter().position(|support| support.lane == lane);
        let known = known.unwrap_or_else(|| {
            node.support.reserve_exact(1);
            node.support.push(Support {
                lane,
                confirmed: 0,
                upper: 0,
            });
            node.support.len() - 1
        });
        let support = &mut node.support[known];
        match from {
            Level::None => {}
            Level::Upper => support.upper -= 1,
            Level::Confirmed => support.confirmed -= 1,
        }
        match to {
            Level::None => {}
            Level::Upper => support.upper += 1,
            Level::Confirmed => support.confirmed += 1,
        }
        if support.confirmed == 0 && support.upper == 0 {
            node.support.swap_remove(known);
        }
        if node.level(lane) != before {
            self.changes.push(Change {
                lane,
                node: at,
                before,
            });
        }
    }

    /// Nothing is held in these lanes.
    pub fn clear(&mut self, lanes: u64) {
        for node in self.slots.iter_mut().flatten() {
            node.support
                .retain(|support| lanes >> support.lane & 1 == 0);
        }
    }

    /// What changed since the last call, as few deltas as say it.
    pub fn take_changes(&mut self) -> Vec<Delta> {
        let changes = std::mem::take(&mut self.changes);
        // By lane; of several changes of a block the first tells what it was.
        let mut order: Vec<usize> = (0..changes.len()).collect();
        order.sort_by_key(|&at| (changes[at].lane, changes[at].node));
        order.dedup_by_key(|at| (changes[*at].lane, changes[*at].node));
        order.sort_unstable_by_key(|&at| (changes[at].lane, at));
        let mut deltas = Deltas::default();
        for change in order.iter().map(|&at| &changes[at]) {
            let Some(node) = self.get(change.node) else {
                continue;
            };
            let now = node.level(change.lane);
            if now != change.before {
                deltas.push(change.lane, now, node);
            }
        }
        deltas.done
    }

    /// Heap bytes, about: walks all nodes.
    pub fn memory_bytes(&self) -> usize {
        let own = |node: &Node| node.support.capacity() * size_of::<Support>();
        self.slots.capacity() * size_of::<Option<Node>>()
            + self.free.capacity() * 4
            + self.table.allocation_size()
            + self.iter().map(own).sum::<usize>()
    }
}

/// Groups blocks into deltas.
#[derive(Default)]
pub struct Deltas {
    /// Finished ones.
    pub done: Vec<Delta>,
}

impl Deltas {
    /// A block is held like this now.
    pub fn push(&mut self, lane: u8, level: Level, node: &Node) {
        let (op, confidence) = match level {
            Level::None => (Op::Drop, 1),
            Level::Upper => (Op::Hold, 2),
            Level::Confirmed => (Op::Hold, 1),
        };
        if let Some(last) = self.done.last_mut() {
            let follows = op == Op::Drop || last.hashes.last() == Some(&node.parent);
            let same = (last.op, last.lane, last.confidence) == (op, lane, confidence);
            if same && follows && last.hashes.len() < MAX_HASHES {
                last.hashes.push(node.hash);
                return;
            }
        }
        let hashes = vec![node.hash];
        self.done.push(Delta {
            op,
            lane,
            confidence,
            parent: node.parent,
            hashes,
        });
    }
}
