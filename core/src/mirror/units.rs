//! Engine blocks by engine hash, and two lists through them: places that may go, orphans that wait.

use hashbrown::HashTable;

use crate::hash::{Media, spread};

/// No unit.
pub const NONE: u32 = u32::MAX;

/// An engine hash, 8 or 32 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// As packed.
    Short([u8; 8]),
    /// As packed.
    Long(Box<[u8; 32]>),
}

impl Key {
    /// From packed bytes of a checked width.
    pub fn new(bytes: &[u8]) -> Key {
        let mut long = [0; 32];
        match <[u8; 8]>::try_from(bytes) {
            Ok(short) => Key::Short(short),
            Err(_) => {
                long[..bytes.len()].copy_from_slice(bytes);
                Key::Long(Box::new(long))
            }
        }
    }

    /// As packed.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Key::Short(bytes) => bytes,
            Key::Long(bytes) => bytes.as_slice(),
        }
    }
}

fn spread_bytes(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0, |hash: u64, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        spread(hash.rotate_left(23) ^ u64::from_le_bytes(word))
    })
}

/// Copies of a unit in one lane.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// Lane number.
    pub lane: u8,
    /// Blocks that the unit covers in this lane, counted from its end. 0: what its place says.
    pub span: u32,
    /// Certain copies.
    pub confirmed: u32,
    /// Copies that may be there.
    pub upper: u32,
}

/// How surely something is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Not held.
    None,
    /// Perhaps.
    Upper,
    /// Certainly.
    Confirmed,
}

impl Copies {
    /// How surely a copy is there.
    pub fn level(&self) -> Level {
        match (self.confirmed, self.upper) {
            (0, 0) => Level::None,
            (0, _) => Level::Upper,
            _ => Level::Confirmed,
        }
    }
}

/// Tokens and media after the last block boundary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Packed.
    pub tokens: Vec<u8>,
    /// Relative to the boundary.
    pub media: Vec<Media>,
}

/// Where a unit lies in the canonical tree.
#[derive(Debug)]
pub struct Spot {
    /// Canonical hash at the last block boundary within or before the unit.
    pub chain: u64,
    /// Blocks up to that boundary.
    pub depth: u32,
    /// Tokens of the unit.
    pub tokens: u32,
    /// Tokens between the last boundary before the unit and its start.
    pub offset: u32,
    /// The unit before, where the unit starts inside a block.
    pub parent: u32,
    /// Units that start where this one ends, inside a block.
    pub children: Vec<u32>,
    /// Canonical blocks that end in the unit, in order; more where another lane's unit of this end is larger.
    pub nodes: Box<[u32]>,
    /// How many of `nodes`, from the end, belong to a unit of `tokens`.
    pub span: u32,
    /// None where the unit ends at a boundary.
    pub tail: Option<Box<Tail>>,
}

/// What an orphan needs to be placed.
#[derive(Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The unit before.
    pub parent: Key,
    /// Tokens of the unit.
    pub unit: u32,
    /// Packed, with the one more of pairs.
    pub tokens: Box<[u8]>,
    /// Relative to the first token.
    pub media: Box<[Media]>,
}

/// What is known of a unit's place.
#[derive(Debug)]
pub enum Place {
    /// Nothing yet, or what is needed once the parent is placed.
    Waiting(Option<Box<Waiting>>),
    /// Keys that nobody else can compute.
    Opaque,
    /// Here.
    At(Spot),
}

/// An engine block.
#[derive(Debug)]
pub struct Unit {
    /// Its engine hash.
    pub key: Key,
    /// Where it lies.
    pub place: Place,
    /// By lane, only lanes that hold it.
    pub held: Vec<Copies>,
    /// When an orphan was stored last.
    pub since: f64,
    prev: u32,
    next: u32,
    list: List,
}

/// The list that a unit is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Held, or needed by another unit.
    No,
    /// Places that may go, least recently used first.
    Idle,
    /// Orphans, oldest first.
    Orphans,
}

impl Unit {
    /// How surely it is held in a lane.
    pub fn level(&self, lane: u8) -> Level {
        self.copies(lane)
            .map_or(Level::None, |copies| copies.level())
    }

    /// Its copies in a lane.
    pub fn copies(&self, lane: u8) -> Option<&Copies> {
        self.held.iter().find(|copies| copies.lane == lane)
    }

    /// Its place, if known and not opaque.
    pub fn spot(&self) -> Option<&Spot> {
        match &self.place {
            Place::At(spot) => Some(spot),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    first: u32,
    last: u32,
    len: usize,
}

/// All units known.
#[derive(Debug)]
pub struct Units {
    slots: Vec<Option<Unit>>,
    free: Vec<u32>,
    table: HashTable<u32>,
    lists: [Ends; 2],
}

impl Default for Units {
    fn default() -> Self {
        let empty = Ends {
            first: NONE,
            last: NONE,
            len: 0,
        };
        Units {
            slots: Vec::new(),
            free: Vec::new(),
            table: HashTable::new(),
            lists: [empty; 2],
        }
    }
}

impl Units {
    /// Units known.
    pub fn count(&self) -> usize {
        self.table.len()
    }

    /// Units in a list.
    pub fn len_of(&self, list: List) -> usize {
        match list {
            List::No => self.count() - self.lists[0].len - self.lists[1].len,
            List::Idle => self.lists[0].len,
            List::Orphans => self.lists[1].len,
        }
    }

    /// First of a list.
    pub fn first(&self, list: List) -> Option<u32> {
        let first = match list {
            List::No => NONE,
            List::Idle => self.lists[0].first,
            List::Orphans => self.lists[1].first,
        };
        (first != NONE).then_some(first)
    }

    /// A unit that is known to exist.
    pub fn get(&self, unit: u32) -> Option<&Unit> {
        self.slots.get(unit as usize)?.as_ref()
    }

    /// The same, to change.
    pub fn get_mut(&mut self, unit: u32) -> Option<&mut Unit> {
        self.slots.get_mut(unit as usize)?.as_mut()
    }

    /// By engine hash.
    pub fn find(&self, key: &[u8]) -> Option<u32> {
        let same = |&unit: &u32| self.get(unit).is_some_and(|unit| unit.key.bytes() == key);
        self.table.find(spread_bytes(key), same).copied()
    }

    /// A new unit, known not to exist.
    pub fn add(&mut self, key: &[u8]) -> u32 {
        let unit = Unit {
            key: Key::new(key),
            place: Place::Waiting(None),
            held: Vec::new(),
            since: 0.0,
            prev: NONE,
            next: NONE,
            list: List::No,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = Some(unit);
                at
            }
            None => {
                self.slots.push(Some(unit));
                (self.slots.len() - 1) as u32
            }
        };
        let slots = &self.slots;
        self.table.insert_unique(spread_bytes(key), at, |&at| {
            slots[at as usize]
                .as_ref()
                .map_or(0, |unit| spread_bytes(unit.key.bytes()))
        });
        at
    }

    /// Forgets a unit and returns it.
    pub fn remove(&mut self, at: u32) -> Option<Unit> {
        self.enlist(at, List::No);
        let unit = self.slots.get_mut(at as usize)?.take()?;
        if let Ok(entry) = self
            .table
            .find_entry(spread_bytes(unit.key.bytes()), |&other| other == at)
        {
            entry.remove();
        }
        self.free.push(at);
        Some(unit)
    }

    /// Puts a unit at the end of a list, out of any other.
    pub fn enlist(&mut self, at: u32, list: List) {
        let Some(unit) = self.get(at) else { return };
        let (prev, next, from) = (unit.prev, unit.next, unit.list);
        if let Some(ends) = Self::ends(&mut self.lists, from) {
            ends.len -= 1;
            if prev == NONE {
                ends.first = next;
            }
            if next == NONE {
                ends.last = prev;
            }
            if let Some(unit) = self.get_mut(prev) {
                unit.next = next;
            }
            if let Some(unit) = self.get_mut(next) {
                unit.prev = prev;
            }
        }
        let mut last = NONE;
        if let Some(ends) = Self::ends(&mut self.lists, list) {
            ends.len += 1;
            last = std::mem::replace(&mut ends.last, at);
            if last == NONE {
                ends.first = at;
            }
        }
        if let Some(unit) = self.get_mut(last) {
            unit.next = at;
        }
        if let Some(unit) = self.get_mut(at) {
            (unit.prev, unit.next, unit.list) = (last, NONE, list);
        }
    }

    fn ends(lists: &mut [Ends; 2], list: List) -> Option<&mut Ends> {
        match list {
            List::No => None,
            List::Idle => Some(&mut lists[0]),
            List::Orphans => Some(&mut lists[1]),
        }
    }

    /// The list that a unit is in.
    pub fn list(&self, at: u32) -> List {
        self.get(at).map_or(List::No, |unit| unit.list)
    }

    /// Every unit.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + use<'_> {
        let used = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, unit)| unit.is_some());
        used.map(|(at, _)| at as u32)
    }

    /// Heap bytes, about: walks all units.
    pub fn memory_bytes(&self) -> usize {
        let own = |unit: &Unit| {
            let key = if matches!(unit.key, Key::Long(_)) {
                32
            } else {
                0
            };
            let place = match &unit.place {
                Place::At(spot) => {
                    spot.nodes.len() * 4
                        + spot.children.capacity() * 4
                        + spot
                            .tail
                            .as_ref()
                            .map_or(0, |tail| size_of::<Tail>() + tail.tokens.capacity())
                }
                Place::Waiting(Some(waiting)) => size_of::<Waiting>() + waiting.tokens.len(),
                _ => 0,
            };
            key + place + unit.held.capacity() * size_of::<Copies>()
        };
        self.slots.capacity() * size_of::<Option<Unit>>()
            + self.free.capacity() * 4
            + self.table.allocation_size()
            + self.slots.iter().flatten().map(own).sum::<usize>()
    }
}
