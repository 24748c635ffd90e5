//! What one rank of one engine holds now, by engine hash, placed in the canonical tree.
//!
//! Residency is a property of (lane, engine hash), placement of the engine hash alone, so that an event may name a
//! block before or after its place is known. A canonical block is held as surely as the surest engine path that covers
//! it; a path is as sure as its least sure unit.

pub mod nodes;
mod placing;
mod snapshot;
pub mod units;

use std::collections::{BTreeMap, HashMap};

use nodes::{Delta, Nodes, Op};
use snapshot::Snapshot;
use units::{Copies, Level, List, NONE, Place, Spot, Unit, Units};

use crate::hash::Media;

/// Why an event was not taken; it changed nothing.
#[derive(Debug)]
pub enum Refusal {
    /// A lane that was never added.
    Unknown(String),
    /// An argument that can't be.
    Invalid(String),
    /// A bounded word for counters, and what was seen.
    Rejected(&'static str, String),
}

/// Bounds and key form, for life.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Canonical block.
    pub block_tokens: u32,
    /// Engine blocks known.
    pub max_units: usize,
    /// Engine blocks that wait for their place.
    pub max_orphans: usize,
    /// How long they wait.
    pub orphan_ttl_s: f64,
    /// Keys are pairs of tokens.
    pub pairs: bool,
}

/// Blocks stored, consecutive after `parent`.
pub struct Stored<'a> {
    /// Lane number.
    pub lane: u32,
    /// Packed engine hashes.
    pub hashes: &'a [u8],
    /// Bytes of one.
    pub width: usize,
    /// None: the root.
    pub parent: Option<&'a [u8]>,
    /// Packed tokens; none for a placeholder.
    pub tokens: &'a [u8],
    /// Tokens of one engine block.
    pub unit: u32,
    /// Seconds.
    pub now: f64,
    /// Namespace, where `parent` is None.
    pub adapter: &'a str,
    /// Namespace, where `parent` is None.
    pub cache_salt: &'a str,
    /// Relative to the first token.
    pub media: &'a [Media],
    /// Keys that nobody else can compute.
    pub opaque: bool,
    /// The engine may hold it: the copies count as UPPER.
    pub doubtful: bool,
    /// Units of `tokens` before the first that has a hash: the engine does not keep them.
    pub masked: u32,
    /// More than the tokens may have entered the hashes: blocks that are known keep their place.
    pub untold: bool,
    /// All that was stored before is known.
    pub whole: bool,
    /// The blocks were computed: it is no mere report of a hit.
    pub computed: bool,
    /// Nothing is stored: blocks that are known learn their place.
    pub places_only: bool,
}

/// Totals since the mirror was made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Removals of what was not held.
    pub removed_unknown: u64,
    /// Orphans that waited too long.
    pub orphans_expired: u64,
    /// Orphans beyond the bound.
    pub orphans_dropped: u64,
    /// Unheld places that made room.
    pub places_evicted: u64,
    /// Calls of `cleared`.
    pub clears: u64,
}

/// Sizes now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Units held in any lane.
    pub units_held: u64,
    /// Units whose place is known.
    pub units_placed: u64,
    /// Units that wait for their place.
    pub orphans: u64,
    /// Units whose keys nobody else can compute.
    pub opaque_units: u64,
    /// Copies that count as UPPER.
    pub ambiguous_copies: u64,
    /// Heap bytes, about.
    pub memory_bytes: u64,
}

/// One engine's cache as it stands.
pub struct Mirror {
    settings: Settings,
    model: String,
    /// By lane number: a multiset?
    lanes: BTreeMap<u8, bool>,
    units: Units,
    nodes: Nodes,
    /// Orphans with tokens, by the engine hash of the unit before them.
    waiting: HashMap<Vec<u8>, Vec<u32>>,
    snapshots: BTreeMap<u64, Snapshot>,
    next_snapshot: u64,
    totals: Totals,
    /// By lane number: copies that are certain, and those that may be there.
    copies: BTreeMap<u8, (u64, u64)>,
}

impl Mirror {
    /// An empty mirror without lanes.
    pub fn new(model: &str, settings: Settings) -> Mirror {
        Mirror {
            settings,
            model: model.to_owned(),
            lanes: BTreeMap::new(),
            units: Units::default(),
            nodes: Nodes::default(),
            waiting: HashMap::new(),
            snapshots: BTreeMap::new(),
            next_snapshot: 0,
            totals: Totals::default(),
            copies: BTreeMap::new(),
        }
    }

    /// Declares a lane. Again with the other meaning: refused.
    pub fn add_lane(&mut self, lane: u32, multiset: bool) -> Result<(), Refusal> {
        let number = u8::try_from(lane).ok().filter(|lane| *lane < 64);
        let Some(number) = number else {
            return Err(Refusal::Invalid(format!("lane {lane}; the largest is 63")));
        };
        if self
            .lanes
            .get(&number)
            .is_some_and(|known| *known != multiset)
        {
            return Err(Refusal::Invalid(format!(
                "lane {lane} was added with multiset={}",
                !multiset
            )));
        }
        self.lanes.insert(number, multiset);
        Ok(())
    }

    /// Copies removed.
    pub fn removed(
        &mut self,
        lane: u32,
        hashes: &[u8],
        width: usize,
    ) -> Result<Vec<Delta>, Refusal> {
        let (lane, _) = self.lane(lane)?;
        check_width(hashes, width)?;
        for key in hashes.chunks_exact(width) {
            let unit = self.units.find(key);
            let copies = unit.and_then(|unit| self.units.get(unit)?.copies(lane).copied());
            let (Some(unit), Some(mut copies)) = (unit, copies) else {
                self.totals.removed_unknown += 1;
                continue;
            };
            // The certain copies go first: what is left is then rather too little than too much.
            match copies.confirmed {
                0 => copies.upper -= 1,
                _ => copies.confirmed -= 1,
            }
            self.set_copies(unit, copies);
            self.settle(unit);
        }
        Ok(self.nodes.take_changes())
    }

    /// Nothing is held in these lanes.
    pub fn cleared(&mut self, lanes: &[u32]) -> Result<Vec<Delta>, Refusal> {
        let mask = self.mask(lanes)?;
        self.totals.clears += 1;
        let numbers: Vec<u32> = self.units.numbers().collect();
        for number in numbers {
            if let Some(unit) = self.units.get_mut(number) {
                let before = unit.held.len();
                unit.held.retain(|copies| mask >> copies.lane & 1 == 0);
                if unit.held.len() != before {
                    self.settle(number);
                }
            }
        }
        self.copies.retain(|lane, _| mask >> lane & 1 == 0);
        self.nodes.clear(mask);
        let cleared = self.lanes.keys().filter(|lane| mask >> **lane & 1 == 1);
        let delta = |lane: &u8| Delta {
            op: Op::Clear,
            lane: *lane,
            confidence: 1,
            parent: 0,
            hashes: Vec::new(),
        };
        Ok(cleared.map(delta).collect())
    }

    /// What these lanes hold is uncertain until it is stored again.
    pub fn suspect(&mut self, lanes: &[u32]) -> Result<Vec<Delta>, Refusal> {
        let mask = self.mask(lanes)?;
        let mut doubted: Vec<(u32, u32)> = Vec::new();
        for number in self.units.numbers() {
            let Some(unit) = self.units.get(number) else {
                continue;
            };
            if unit
                .held
                .iter()
                .any(|copies| mask >> copies.lane & 1 == 1 && copies.confirmed > 0)
            {
                doubted.push((unit.spot().map_or(0, |spot| spot.depth), number));
            }
        }
        doubted.sort_unstable();
        for (_, number) in doubted {
            let held = self
                .units
                .get(number)
                .map(|unit| unit.held.clone())
                .unwrap_or_default();
            for mut copies in held {
                if mask >> copies.lane & 1 == 1 {
                    copies.upper = copies.upper.saturating_add(copies.confirmed);
                    copies.confirmed = 0;
                    self.set_copies(number, copies);
                }
            }
        }
        Ok(self.nodes.take_changes())
    }

    /// A new engine life.
    pub fn reset(&mut self) {
        self.units = Units::default();
        self.nodes = Nodes::default();
        self.waiting = HashMap::new();
        self.copies.clear();
        for snapshot in self.snapshots.values_mut() {
            *snapshot = Snapshot::default();
        }
    }

    /// Drops orphans that waited too long; returns how many.
    pub fn expire(&mut self, now: f64) -> u64 {
        let ttl = self.settings.orphan_ttl_s;
        let old = |unit: &Unit| matches!(unit.place, Place::Waiting(_)) && now - unit.since > ttl;
        let expired: Vec<u32> = self
            .units
            .numbers()
            .filter(|&number| self.units.get(number).is_some_and(old))
            .collect();
        for &number in &expired {
            self.forget(number);
        }
        self.totals.orphans_expired += expired.len() as u64;
        expired.len() as u64
    }

    /// Starts a snapshot; returns its number.
    pub fn begin_snapshot(&mut self) -> u64 {
        self.next_snapshot += 1;
        self.snapshots
            .insert(self.next_snapshot, Snapshot::new(&self.nodes));
        self.next_snapshot
    }

    /// The next part. Empty: it is over and forgotten.
    pub fn next_snapshot(&mut self, number: u64, max_hashes: usize) -> Result<Vec<Delta>, Refusal> {
        if max_hashes == 0 {
            return Err(Refusal::Invalid("a part of at most 0 hashes".to_owned()));
        }
        let snapshot = self.snapshots.get_mut(&number);
        let snapshot = snapshot.ok_or_else(|| Refusal::Unknown(format!("snapshot {number}")))?;
        let part = snapshot.next(&self.nodes, max_hashes);
        if part.is_empty() {
            self.snapshots.remove(&number);
        }
        Ok(part)
    }

    /// Forgets a snapshot.
    pub fn end_snapshot(&mut self, number: u64) {
        self.snapshots.remove(&number);
    }

    /// Hash and number of the canonical blocks up to the end of a unit that is placed and ends with a block.
    pub fn place(&self, key: &[u8]) -> Option<(u64, u32)> {
        let spot = self.units.get(self.units.find(key)?)?.spot()?;
        spot.tail.is_none().then_some((spot.chain, spot.depth))
    }

    /// Whether a lane holds a block, surely or perhaps.
    pub fn holds(&self, lane: u32, key: &[u8]) -> Result<bool, Refusal> {
        let (lane, _) = self.lane(lane)?;
        let unit = self
            .units
            .find(key)
            .and_then(|number| self.units.get(number));
        Ok(unit.is_some_and(|unit| unit.level(lane) != Level::None))
    }

    /// Copies in a lane: certain ones, and those that may be there.
    pub fn copies(&self, lane: u32) -> Result<(u64, u64), Refusal> {
        let (lane, _) = self.lane(lane)?;
        Ok(self.copies.get(&lane).copied().unwrap_or_default())
    }

    /// Blocks that wait for their place.
    pub fn orphans(&self) -> u64 {
        self.units.len_of(List::Orphans) as u64
    }

    /// Canonical hashes held with this confidence, ascending.
    pub fn holdings(&self, lane: u32, confidence: u8) -> Result<Vec<u64>, Refusal> {
        let (lane, _) = self.lane(lane)?;
        let level = match confidence {
            1 => Level::Confirmed,
            2 => Level::Upper,
            _ => {
                let text = format!("confidence {confidence}; known: 1 (confirmed), 2 (upper)");
                return Err(Refusal::Invalid(text));
            }
        };
        let held = self.nodes.iter().filter(|node| node.level(lane) == level);
        let mut hashes: Vec<u64> = held.map(|node| node.hash).collect();
        hashes.sort_unstable();
        Ok(hashes)
    }

    /// Sizes now: walks the whole mirror.
    pub fn sizes(&self) -> Sizes {
        let mut sizes = Sizes {
            orphans: self.orphans(),
            memory_bytes: (self.units.memory_bytes() + self.nodes.memory_bytes()) as u64,
            ..Sizes::default()
        };
        for unit in self
            .units
            .numbers()
            .filter_map(|number| self.units.get(number))
        {
            sizes.units_held += u64::from(!unit.held.is_empty());
            sizes.units_placed += u64::from(matches!(unit.place, Place::At(_)));
            sizes.opaque_units += u64::from(matches!(unit.place, Place::Opaque));
            sizes.ambiguous_copies += unit
                .held
                .iter()
                .map(|copies| u64::from(copies.upper))
                .sum::<u64>();
        }
        sizes
    }

    /// Totals since the mirror was made.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    fn lane(&self, lane: u32) -> Result<(u8, bool), Refusal> {
        let known = u8::try_from(lane)
            .ok()
            .and_then(|lane| Some((lane, *self.lanes.get(&lane)?)));
        known.ok_or_else(|| Refusal::Unknown(format!("lane {lane}")))
    }

    fn mask(&self, lanes: &[u32]) -> Result<u64, Refusal> {
        lanes
            .iter()
            .try_fold(0, |mask, &lane| Ok(mask | 1 << self.lane(lane)?.0))
    }

    /// Records the copies of a unit in one lane, and what follows for the blocks it covers.
    fn set_copies(&mut self, number: u32, copies: Copies) {
        let Some(unit) = self.units.get_mut(number) else {
            return;
        };
        let before = unit.level(copies.lane);
        let after = copies.level();
        let known = unit.held.iter().position(|known| known.lane == copies.lane);
        let had = known.map_or((0, 0), |at| (unit.held[at].confirmed, unit.held[at].upper));
        let tally = self.copies.entry(copies.lane).or_default();
        tally.0 = tally.0 - u64::from(had.0) + u64::from(copies.confirmed);
        tally.1 = tally.1 - u64::from(had.1) + u64::from(copies.upper);
        match known {
            Some(at) if after == Level::None => {
                unit.held.swap_remove(at);
            }
            Some(at) => unit.held[at] = copies,
            None if after == Level::None => {}
            None => {
                unit.held.reserve_exact(1);
                unit.held.push(copies);
            }
        }
        self.shift(number, copies.lane, copies.span, before, after);
    }

    /// A unit went from one level to another in a lane: so do the paths through it.
    fn shift(&mut self, number: u32, lane: u8, span: u32, from: Level, to: Level) {
        if from == to {
            return;
        }
        let Some(spot) = self.units.get(number).and_then(Unit::spot) else {
            return;
        };
        let rest = self.level_before(spot, lane);
        let span = if span == 0 { spot.span } else { span };
        let first = spot.nodes.len().saturating_sub(span as usize);
        for (at, &node) in spot.nodes.iter().enumerate().skip(first) {
            // The first block of a unit that starts inside it needs the units before as well.
            let rest = if at == 0 && spot.offset > 0 {
                rest
            } else {
                Level::Confirmed
            };
            self.nodes.shift(node, lane, from.min(rest), to.min(rest));
        }
        let rest = if spot.nodes.is_empty() {
            rest
        } else {
            Level::Confirmed
        };
        let mut paths: Vec<(u32, Level)> =
            spot.children.iter().map(|&child| (child, rest)).collect();
        while let Some((child, rest)) = paths.pop() {
            let Some(unit) = self.units.get(child) else {
                continue;
            };
            let rest = rest.min(unit.level(lane));
            let Some(spot) = unit.spot().filter(|_| rest != Level::None) else {
                continue;
            };
            match spot.nodes.first() {
                Some(&node) => self.nodes.shift(node, lane, from.min(rest), to.min(rest)),
                None => paths.extend(spot.children.iter().map(|&child| (child, rest))),
            }
        }
    }

    /// How surely a lane holds the part of a unit's first block that lies before the unit.
    fn level_before(&self, spot: &Spot, lane: u8) -> Level {
        let mut level = Level::Confirmed;
        let mut at = spot;
        while at.offset > 0 {
            let Some(parent) = self.units.get(at.parent) else {
                break;
            };
            level = level.min(parent.level(lane));
            match parent.spot() {
                Some(spot) if spot.nodes.is_empty() => at = spot,
                _ => break,
            }
        }
        level
    }

    /// Puts a unit on the list where it belongs now, as the newest.
    fn settle(&mut self, number: u32) {
        let Some(unit) = self.units.get(number) else {
            return;
        };
        let list = match &unit.place {
            // An orphan keeps its turn: only storing it again moves it.
            Place::Waiting(_) if self.units.list(number) == List::Orphans => return,
            Place::Waiting(_) => List::Orphans,
            _ if !unit.held.is_empty() => List::No,
            Place::At(spot) if !spot.children.is_empty() => List::No,
            _ => List::Idle,
        };
        self.units.enlist(number, list);
    }

    /// Forgets a unit: an orphan, or a place that nothing needs.
    fn forget(&mut self, number: u32) {
        let Some(unit) = self.units.remove(number) else {
            return;
        };
        for copies in &unit.held {
            if let Some(tally) = self.copies.get_mut(&copies.lane) {
                tally.0 -= u64::from(copies.confirmed);
                tally.1 -= u64::from(copies.upper);
            }
        }
        match unit.place {
            Place::Waiting(Some(waiting)) => {
                if let Some(children) = self.waiting.get_mut(waiting.parent.bytes()) {
                    children.retain(|&child| child != number);
                    if children.is_empty() {
                        self.waiting.remove(waiting.parent.bytes());
                    }
                }
            }
            Place::At(spot) => {
                for &node in &spot.nodes {
                    self.nodes.release(node);
                }
                if spot.parent != NONE {
                    if let Some(Place::At(parent)) =
                        self.units.get_mut(spot.parent).map(|unit| &mut unit.place)
                    {
                        parent.children.retain(|&child| child != number);
                    }
                    // Its turn came with its child's.
                    self.settle(spot.parent);
                }
            }
            Place::Waiting(None) | Place::Opaque => {}
        }
    }
}

/// Packed hashes of a width that engines use.
fn check_width(hashes: &[u8], width: usize) -> Result<(), Refusal> {
    if width != 8 && width != 32 {
        return Err(Refusal::Invalid(format!(
            "hashes {width} bytes wide; known: 8, 32"
        )));
    }
    if !hashes.len().is_multiple_of(width) {
        return Err(Refusal::Invalid(format!(
            "{} bytes of hashes {width} bytes wide",
            hashes.len()
        )));
    }
    Ok(())
}
