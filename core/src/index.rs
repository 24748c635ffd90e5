//! The prefix index of one model: replicas, ranks, lanes and credits over the tree, and the answer to a prompt.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashTable;
use smallvec::SmallVec;

use crate::bits::{self, Blocks};
use crate::credits::Credits;
use crate::hash::spread;
use crate::recency::{Clock, Removals, Stamp, UNKNOWN};
use crate::resume::{Class, Credited, Held, Plan, Profile, Question, TIERS};
use crate::tree::{Found, Holder, Tree};

/// Event seen, sequence unbroken.
pub const CONFIRMED: u8 = 1;
/// The engine may hold it.
pub const UPPER: u8 = 2;

const NO_RANK: u32 = u32::MAX;

/// Why a call was refused; it changed nothing.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A replica, rank or lane that was never declared.
    Unknown(String),
    /// An argument that can't be.
    Invalid(String),
}

struct Rank {
    replica: u32,
    rank: u32,
    trusted: bool,
    complete: bool,
    /// Holdings were evicted: not complete until cleared and sent again.
    lossy: bool,
    credits: u32,
    /// Place of its row in the roll.
    place: u32,
    /// By lane number: holders of confirmed and of UPPER blocks.
    lanes: BTreeMap<u8, [Holder; 2]>,
    plan: Arc<Plan>,
    /// In the order of the plan's lanes.
    in_plan: Vec<Option<[Holder; 2]>>,
    /// Likewise: the store that a lane shows, by its place in the roll.
    shared: Vec<Option<usize>>,
    /// By tier.
    removals: [Removals; TIERS],
}

struct Replica {
    profile: Profile,
    plan: Arc<Plan>,
}

/// What one rank is expected to reuse of a prompt, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Number from `add_replica`.
    pub replica: u32,
    /// Data-parallel rank.
    pub rank: u32,
    /// By confirmed blocks alone.
    pub lower: u64,
    /// With credits, and UPPER blocks where they count.
    pub predicted: u64,
    /// With everything possible.
    pub upper: u64,
    /// `predicted`, split.
    pub tiers: [u64; TIERS],
    /// What `predicted` owes to credits and UPPER blocks.
    pub credited: u64,
    /// Of the block where `predicted` ends.
    pub tail: Tail,
}

/// Where a block is held to the last by one rank, and since when it is idle there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// The slowest tier that holds it, from 1 on: with that copy the block is gone. What is only credited counts as held
    /// on the GPU. 0: none does, or no time is told.
    pub tier: u8,
    /// When it was last used there, by the layer group that did so the longest ago.
    pub used: Stamp,
}

/// Sizes.
pub struct Counts {
    /// (holder, block) pairs.
    pub entries: u64,
    /// Blocks that somebody holds.
    pub blocks: usize,
    /// Runs in use.
    pub runs: usize,
    /// Open credits.
    pub credits: usize,
    /// Heap bytes.
    pub memory_bytes: usize,
    /// Pairs evicted, ever.
    pub evicted: u64,
}

/// A rank's lane, as events name it.
struct Known {
    replica: u32,
    rank: u32,
    lane: u32,
    slot: u32,
    number: u8,
    holders: [Holder; 2],
}

/// A rank, in the order of answers.
struct Row {
    replica: u32,
    rank: u32,
    slot: u32,
    /// Equal for ranks that answer alike for alike prefixes, if these are all that an answer rests on; or NO_PLAN.
    plan: u32,
    /// Blocks of the prompt at hand that are confirmed, from the first on.
    prefix: u64,
}

/// Where the prediction of a rank for the prompt at hand ends.
#[derive(Clone, Copy)]
struct End {
    /// Of its last block, in the tree; or NOWHERE.
    place: u32,
    /// Position of the answer.
    answer: u32,
}

/// What a roll keeps of a holder, in one word: the place of its row, four bits to the left of the tier, which counts
/// from 1 and is 0 in a lane out of plan; the last bit is set if the holder holds UPPER blocks.
#[derive(Clone, Copy, Default)]
struct Packed(u32);

impl Packed {
    fn place(self) -> usize {
        (self.0 >> 4) as usize
    }

    fn tier(self) -> u8 {
        (self.0 >> 1 & 7) as u8
    }

    fn upper(self) -> bool {
        self.0 & 1 == 1
    }
}

const NO_PLAN: u32 = u32::MAX;
const NOWHERE: u32 = u32::MAX;

/// The ranks in the order of answers, as of the last change.
#[derive(Default)]
struct Roll {
    stale: bool,
    rows: Vec<Row>,
    /// By holder: the place of its row, its tier, and whether it holds UPPER blocks.
    place: Vec<Packed>,
    /// Bit by place: this rank may reuse something of a prompt of which it holds nothing.
    always: Vec<u64>,
    /// Some bit of `always` is set.
    any: bool,
    /// Bit by place: this rank has something to say of the prompt at hand.
    seen: Vec<u64>,
    /// Bit by place: more than the prefix counts.
    mixed: Vec<u64>,
    /// Stores that several may load from: who tells of each.
    stores: Vec<Vec<[Holder; 2]>>,
    /// Bit by place: this rank can load from a store.
    attached: Vec<u64>,
    /// By place in the roll: of the ranks seen.
    ends: Vec<End>,
    /// Where answers end, each place in the tree once or more often.
    tails: Vec<u32>,
}

#[derive(Default)]
struct CreditBits {
    attention: Vec<u64>,
    state: Vec<u64>,
    possible: Vec<u64>,
}

/// Which replica and rank holds which block, in which lane.
pub struct Index {
    block_tokens: u32,
    max_entries: u64,
    tree: Tree,
    credits: Credits,
    replicas: BTreeMap<u32, Replica>,
    next_replica: u32,
    /// For some replica a block that nobody holds doesn't end the walk.
    passes_gaps: bool,
    /// (replica, rank) to slot, in the order of answers.
    slots: BTreeMap<(u32, u32), u32>,
    ranks: Vec<Rank>,
    free_ranks: Vec<u32>,
    free_holders: Vec<Holder>,
    /// By holder: its rank's slot.
    holder_rank: Vec<u32>,
    evicted: u64,
    clock: Clock,
    /// Lanes that events have named: forgotten when a profile changes or a replica goes.
    known: HashTable<Known>,
    roll: Roll,
    found: Found,
    /// By slot.
    credit_bits: Vec<CreditBits>,
    /// Slots with credits for the prompt at hand.
    credited: Vec<u32>,
    /// Scratch of `remove`.
    lost: Vec<Stamp>,
}

impl Index {
    /// An empty index.
    pub fn new(block_tokens: u32, max_entries: u64) -> Index {
        Index {
            block_tokens,
            max_entries,
            tree: Tree::default(),
            credits: Credits::default(),
            replicas: BTreeMap::new(),
            next_replica: 0,
            passes_gaps: false,
            slots: BTreeMap::new(),
            ranks: Vec::new(),
            free_ranks: Vec::new(),
            free_holders: Vec::new(),
            holder_rank: Vec::new(),
            evicted: 0,
            clock: Clock::default(),
            known: HashTable::new(),
            roll: Roll::default(),
            found: Found::default(),
            credit_bits: Vec::new(),
            credited: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// The time of the calls to come, in seconds of any epoch; None: they have none.
    pub fn set_time(&mut self, now: Option<f64>) {
        self.clock.set(now);
        self.tree.set_time(self.clock.now);
    }

    /// A new replica; its number is never reused.
    pub fn add_replica(&mut self, profile: &Profile) -> Result<u32, Refusal> {
        let plan = self.plan(profile)?;
        let number = self.next_replica;
        self.next_replica += 1;
        self.replicas.insert(
            number,
            Replica {
                profile: profile.clone(),
                plan,
            },
        );
        self.look_for_gaps();
        Ok(number)
    }

    /// Replaces how a replica is read. Holdings of lanes that are gone are gone.
    pub fn set_profile(&mut self, replica: u32, profile: &Profile) -> Result<(), Refusal> {
        self.replica(replica)?;
        let plan = self.plan(profile)?;
        for slot in self.slots_of(replica) {
            let lanes = std::mem::take(&mut self.ranks[slot as usize].lanes);
            for (lane, holders) in lanes {
                if profile.lanes.iter().any(|declared| declared.number == lane) {
                    self.ranks[slot as usize].lanes.insert(lane, holders);
                } else {
                    self.retire(holders);
                }
            }
            self.arrange(slot, &plan);
        }
        self.replicas.insert(
            replica,
            Replica {
                profile: profile.clone(),
                plan,
            },
        );
        self.look_for_gaps();
        self.known.clear();
        self.roll.stale = true;
        Ok(())
    }

    /// Forgets a replica with its ranks, holdings and credits.
    pub fn remove_replica(&mut self, replica: u32) -> Result<(), Refusal> {
        self.replica(replica)?;
        for slot in self.slots_of(replica) {
            self.credits.close_rank(slot);
            let lanes = std::mem::take(&mut self.ranks[slot as usize].lanes);
            for holders in lanes.into_values() {
                self.retire(holders);
            }
            self.ranks[slot as usize].in_plan.clear();
            self.free_ranks.push(slot);
        }
        self.slots.retain(|(of, _), _| *of != replica);
        self.replicas.remove(&replica);
        self.look_for_gaps();
        self.known.clear();
        self.roll.stale = true;
        Ok(())
    }

    /// Adds or updates a rank.
    pub fn set_rank(
        &mut self,
        replica: u32,
        rank: u32,
        trusted: bool,
        complete: bool,
    ) -> Result<(), Refusal> {
        let plan = Arc::clone(&self.replica(replica)?.plan);
        if let Some(&slot) = self.slots.get(&(replica, rank)) {
            let known = &mut self.ranks[slot as usize];
            self.roll.stale |= (known.trusted, known.complete) != (trusted, complete);
            known.trusted = trusted;
            known.complete = complete;
            return Ok(());
        }
        let new = Rank {
            replica,
            rank,
            trusted,
            complete,
            lossy: false,
            credits: 0,
            place: 0,
            lanes: BTreeMap::new(),
            plan: Arc::clone(&plan),
            in_plan: Vec::new(),
            shared: Vec::new(),
            removals: Default::default(),
        };
        let slot = match self.free_ranks.pop() {
            Some(slot) => {
                self.ranks[slot as usize] = new;
                slot
            }
            None => {
                self.ranks.push(new);
                (self.ranks.len() - 1) as u32
            }
        };
        self.slots.insert((replica, rank), slot);
        self.arrange(slot, &plan);
        self.roll.stale = true;
        Ok(())
    }

    /// Returns how many blocks were not held with this confidence before.
    pub fn hold(
        &mut self,
        replica: u32,
        rank: u32,
        lane: u32,
        confidence: u8,
        parent: u64,
        hashes: &[u64],
    ) -> Result<u64, Refusal> {
        let known = self.known(replica, rank, lane);
        let (slot, number) = match known {
            Some((slot, number, _)) => (slot, number),
            None => (self.slot(replica, rank)?, self.lane(replica, lane)?),
        };
        if confidence != CONFIRMED && confidence != UPPER {
            return Err(Refusal::Invalid(format!(
                "confidence {confidence}; known: 1 (confirmed), 2 (upper)"
            )));
        }
        if hashes.contains(&0) {
            return Err(Refusal::Invalid("hash 0 is no block".to_owned()));
        }
        if self.tree.is_full() {
            self.evict(self.tree.entries() / 64 * 63);
        }
        let holders = match known {
            Some((_, _, holders)) => holders,
            None => self.know(replica, rank, lane, slot, number),
        };
        let (holder, instead) = match confidence {
            CONFIRMED => (holders[0], holders[1]),
            _ => (holders[1], holders[0]),
        };
        let new = self.tree.hold(holder, instead, parent, hashes);
        if self.ranks[slot as usize].credits > 0 && self.ends_credits(replica, number, confidence) {
            for &hash in hashes {
                self.credits.supersede(slot, hash);
            }
        }
        if self.tree.entries() > self.max_entries {
            // Some more than needed, so that a full index doesn't look for the oldest runs at every event.
            self.evict(self.max_entries - self.max_entries / 64);
        }
        Ok(new)
    }

    /// Returns how many blocks were held.
    pub fn drop(
        &mut self,
        replica: u32,
        rank: u32,
        lane: u32,
        hashes: &[u64],
    ) -> Result<u64, Refusal> {
        if let Some((slot, number, holders)) = self.known(replica, rank, lane) {
            return Ok(self.remove(slot, number, holders, hashes));
        }
        let slot = self.slot(replica, rank)?;
        let number = self.lane(replica, lane)?;
        let holders = self.ranks[slot as usize].lanes.get(&number).copied();
        Ok(holders.map_or(0, |holders| self.remove(slot, number, holders, hashes)))
    }

    /// A block that another lane of the rank still holds has only moved; what leaves the last one was evicted.
    fn remove(&mut self, slot: u32, number: u8, holders: [Holder; 2], hashes: &[u64]) -> u64 {
        if self.clock.now == UNKNOWN {
            return self.tree.drop(holders, hashes);
        }
        let rank = &mut self.ranks[slot as usize];
        let lanes = rank.lanes.iter().filter(|(other, _)| **other != number);
        let others: SmallVec<[Holder; 8]> = lanes.flat_map(|(_, holders)| *holders).collect();
        let mut lost = std::mem::take(&mut self.lost);
        let dropped = self.tree.drop_telling(holders, &others, hashes, &mut lost);
        let lanes = &mut rank.plan.lanes.iter();
        if let Some(lane) = lanes.find(|lane| lane.number == number) {
            let ages = lost.iter().filter_map(|used| self.clock.since(*used));
            // What was to be used soon went before: how long it was idle by then is not known.
            rank.removals[lane.tier].extend(ages.filter(|age| *age >= 0.0));
        }
        lost.clear();
        self.lost = lost;
        dropped
    }

    /// A rank uses what it holds of these blocks at the time that was set, which may be one to come.
    pub fn touch(&mut self, replica: u32, rank: u32, hashes: &[u64]) -> Result<(), Refusal> {
        let slot = self.slot(replica, rank)?;
        if self.clock.now != UNKNOWN {
            let lanes = self.ranks[slot as usize].lanes.values();
            let holders: SmallVec<[Holder; 8]> = lanes.flatten().copied().collect();
            self.tree.touch(&holders, hashes);
        }
        Ok(())
    }

    /// How long a rank has not used blocks of a prompt, from the first on, up to one that it does not hold: how many
    /// blocks, and seconds in the slowest tier that holds them, if known.
    pub fn idle(
        &self,
        replica: u32,
        rank: u32,
        hashes: &[u64],
    ) -> Result<Vec<(u64, Option<f64>)>, Refusal> {
        let rank = &self.ranks[self.slot(replica, rank)? as usize];
        let lanes = rank.plan.lanes.iter().zip(&rank.in_plan);
        let holders: Vec<(usize, Holder)> = lanes
            .flat_map(|(lane, holders)| holders.iter().flatten().map(|holder| (lane.tier, *holder)))
            .collect();
        let mut idle = Vec::new();
        for (blocks, place) in self.tree.stretches(hashes) {
            let held = holders
                .iter()
                .filter_map(|(tier, holder)| Some((*tier, self.tree.used(*holder, place)?)));
            // The slowest tier; in it, the longest ago.
            let Some((_, used)) = held.max_by_key(|(tier, used)| (*tier, Stamp::MAX - used)) else {
                break;
            };
            idle.push((blocks, self.clock.since(used)));
        }
        Ok(idle)
    }

    /// Seconds since a time that an answer gave; None: not known.
    pub fn since(&self, used: Stamp) -> Option<f64> {
        self.clock.since(used)
    }

    /// Removals of a rank by tier that were no moves to another tier: how many, and the median age in seconds of the last
    /// 64 if there were enough. Tiers without any are left out.
    pub fn turnover(
        &mut self,
        replica: u32,
        rank: u32,
    ) -> Result<Vec<(u8, u64, Option<f64>)>, Refusal> {
        let slot = self.slot(replica, rank)?;
        let tiers = (1..).zip(&mut self.ranks[slot as usize].removals);
        Ok(tiers
            .filter(|(_, removals)| removals.count > 0)
            .map(|(tier, removals)| (tier, removals.count, removals.median()))
            .collect())
    }

    /// Drops a lane or all lanes of a rank; returns how many blocks were held.
    pub fn clear(&mut self, replica: u32, rank: u32, lane: Option<u32>) -> Result<u64, Refusal> {
        let slot = self.slot(replica, rank)?;
        let only = lane.map(|lane| self.lane(replica, lane)).transpose()?;
        if only.is_none() {
            let rank = &mut self.ranks[slot as usize];
            self.roll.stale |= rank.lossy;
            rank.lossy = false;
            // An empty cache evicts nothing for a while: what was seen of a full one says nothing of it.
            rank.removals = Default::default();
        }
        let lanes = self.ranks[slot as usize].lanes.iter();
        let holders: Vec<Holder> = lanes
            .filter(|(number, _)| only.is_none_or(|only| only == **number))
            .flat_map(|(_, holders)| *holders)
            .collect();
        Ok(holders
            .into_iter()
            .map(|holder| self.tree.clear(holder))
            .sum())
    }

    /// The blocks will be used at the time that was set, which may be one to come. False: a credit of that name is open
    /// already.
    pub fn open_credit(
        &mut self,
        decision: &str,
        replica: u32,
        rank: u32,
        hashes: Vec<u64>,
        prompt: u64,
    ) -> Result<bool, Refusal> {
        let slot = self.slot(replica, rank)?;
        self.covered(prompt, hashes.len())?;
        let state = self.ranks[slot as usize].plan.kept_state(prompt);
        let opened = self
            .credits
            .open(decision, slot, hashes, state, self.clock.now);
        self.ranks[slot as usize].credits += u32::from(opened);
        Ok(opened)
    }

    /// False: no credit of that name is open.
    pub fn close_credit(&mut self, decision: &str) -> bool {
        let slot = self.credits.close(decision);
        if let Some(slot) = slot {
            self.ranks[slot as usize].credits -= 1;
        }
        slot.is_some()
    }

    /// Ends every credit of a rank; returns how many.
    pub fn close_credits(&mut self, replica: u32, rank: u32) -> Result<usize, Refusal> {
        let slot = self.slot(replica, rank)?;
        self.ranks[slot as usize].credits = 0;
        Ok(self.credits.close_rank(slot))
    }

    /// Credits open on a rank.
    pub fn credits(&self, replica: u32, rank: u32) -> Result<u32, Refusal> {
        Ok(self.ranks[self.slot(replica, rank)? as usize].credits)
    }

    /// What ranks are expected to reuse, by (replica, rank). A rank that is left out can reuse nothing.
    pub fn find(
        &mut self,
        hashes: &[u64],
        prompt: u64,
        no_reuse: bool,
    ) -> Result<Vec<Match>, Refusal> {
        self.covered(prompt, hashes.len())?;
        if no_reuse {
            return Ok(Vec::new());
        }
        self.read_credits(hashes);
        let passes_gaps = self.passes_gaps;
        let credits = &self.credits;
        self.tree.walk(hashes, &mut self.found, |at| {
            passes_gaps || credits.covers(hashes[at]).is_some()
        });
        if !self.look() {
            return Ok(Vec::new());
        }
        let Roll {
            rows,
            seen,
            mixed,
            stores,
            ends,
            tails,
            ..
        } = &mut self.roll;
        tails.clear();
        let timed = self.clock.now != UNKNOWN;
        let count: u32 = seen.iter().map(|word| word.count_ones()).sum();
        let mut matches: Vec<Match> = Vec::with_capacity(count as usize);
        let blocks = hashes.len() as u64;
        let stores: Vec<[Vec<u64>; 2]> = stores
            .iter()
            .map(|told| union(&self.found, told, blocks))
            .collect();
        let mut held = Vec::new();
        // What the last answer rested on, if on nothing but its plan and its prefix.
        let mut last = (NO_PLAN, 0);
        let mut answer = Match::default();
        let mut tail = NOWHERE;
        for (at, (&word, &mixed)) in seen.iter().zip(mixed.iter()).enumerate() {
            let mut word = word;
            while word != 0 {
                let bit = word.trailing_zeros();
                word &= word - 1;
                let place = 64 * at + bit as usize;
                let row = &rows[place];
                let basis = match mixed >> bit & 1 {
                    0 => (row.plan, row.prefix),
                    _ => (NO_PLAN, 0),
                };
                if basis.0 != NO_PLAN && basis == last {
                    ends[place] = End {
                        place: tail,
                        answer: matches.len() as u32,
                    };
                    matches.push(Match {
                        replica: row.replica,
                        rank: row.rank,
                        ..answer
                    });
                    continue;
                }
                last = basis;
                let rank = &self.ranks[row.slot as usize];
                held.clear();
                held.extend(rank.in_plan.iter().map(|holders| match holders {
                    Some([confirmed, upper]) => Held {
                        confirmed: self.found.of(*confirmed),
                        upper: self.found.of(*upper),
                    },
                    None => Held::default(),
                }));
                for (held, store) in held.iter_mut().zip(&rank.shared) {
                    if let Some([confirmed, upper]) = store.and_then(|store| stores.get(store)) {
                        let bits = |bits| Blocks { prefix: 0, bits };
                        (held.confirmed, held.upper) = (bits(confirmed), bits(upper));
                    }
                }
                let credited = match self.credit_bits.get(row.slot as usize) {
                    Some(bits) => Credited {
                        attention: &bits.attention,
                        state: &bits.state,
                        possible: &bits.possible,
                    },
                    None => Credited::default(),
                };
                let question = Question {
                    plan: &rank.plan,
                    prompt,
                    blocks,
                    held: &held,
                    credited,
                };
                answer = rank.answer(&question);
                tail = NOWHERE;
                if timed && answer.predicted > 0 {
                    let block = (answer.predicted - 1) / u64::from(self.block_tokens);
                    if let Some(found) = self.found.place(block) {
                        tail = found;
                        tails.push(found);
                    }
                }
                ends[place] = End {
                    place: tail,
                    answer: matches.len() as u32,
                };
                matches.push(answer);
            }
        }
        if timed {
            self.date(&mut matches, hashes);
        }
        Ok(matches)
    }

    /// Says of each answer since when the block is idle where it ends. Answers are those of the ranks seen, in order.
    fn date(&mut self, matches: &mut [Match], hashes: &[u64]) {
        let Roll {
            place, ends, tails, ..
        } = &mut self.roll;
        tails.sort_unstable();
        tails.dedup();
        for &tail in tails.iter() {
            self.tree.each_holder_at(tail, |holder, used| {
                let packed = place[holder as usize];
                let end = ends[packed.place()];
                if end.place != tail {
                    return;
                }
                let of = &mut matches[end.answer as usize].tail;
                let tier = packed.tier();
                if tier > of.tier {
                    *of = Tail { tier, used };
                } else if tier == of.tier {
                    of.used = of.used.min(used);
                }
            });
        }
        if self.credited.is_empty() {
            return;
        }
        // What only credits speak of will be on the GPU.
        for found in matches
            .iter_mut()
            .filter(|found| found.predicted > 0 && found.tail.tier == 0)
        {
            let block = (found.predicted - 1) / u64::from(self.block_tokens);
            let hash = hashes.get(block as usize);
            let covers = hash.and_then(|hash| self.credits.covers(*hash));
            let slot = self.slots.get(&(found.replica, found.rank));
            let cover = covers
                .into_iter()
                .flatten()
                .find(|cover| slot.is_some_and(|slot| *slot == cover.rank) && cover.attention > 0);
            if let Some(cover) = cover {
                found.tail = Tail {
                    tier: 1,
                    used: cover.used,
                };
            }
        }
    }

    /// Median idle time, in seconds, at which a rank's tier evicts; None: not known. Tiers count from 1.
    pub fn turnover_of(&mut self, found: &Match) -> Option<f64> {
        let tier = usize::from(found.tail.tier).checked_sub(1)?;
        let slot = self.slots.get(&(found.replica, found.rank))?;
        self.ranks[*slot as usize].removals.get_mut(tier)?.median()
    }

    /// Which ranks have something to say of the prompt at hand, and what it rests on. False: none has.
    fn look(&mut self) -> bool {
        if self.roll.stale {
            self.call();
        }
        let roll = &mut self.roll;
        if self.found.holders().is_empty() && self.credited.is_empty() && !roll.any {
            return false;
        }
        roll.seen.clone_from(&roll.always);
        roll.mixed.clone_from(&roll.always);
        // Holders are met about in the order of their ranks: a word is filled before it is stored.
        let (mut at, mut seen) = (0, 0);
        for (holder, prefix) in self.found.prefixes() {
            let packed = roll.place[holder as usize];
            let place = packed.place();
            let bit = 1 << (place % 64);
            if place / 64 != at {
                roll.seen[at] |= seen;
                (at, seen) = (place / 64, 0);
            }
            seen |= bit;
            match packed.upper() {
                // 0 if only blocks behind a hole are held.
                false => roll.rows[place].prefix = prefix,
                true => roll.mixed[at] |= bit,
            }
        }
        if seen != 0 {
            roll.seen[at] |= seen;
        }
        let told = roll.stores.iter().flatten().flatten();
        if told
            .into_iter()
            .any(|&holder| !self.found.of(holder).is_empty())
        {
            for (at, &attached) in roll.attached.iter().enumerate() {
                roll.seen[at] |= attached;
                roll.mixed[at] |= attached;
            }
        }
        for &slot in &self.credited {
            let place = self.ranks[slot as usize].place as usize;
            roll.seen[place / 64] |= 1 << (place % 64);
            roll.mixed[place / 64] |= 1 << (place % 64);
        }
        true
    }

    /// Makes the roll anew.
    fn call(&mut self) {
        let roll = &mut self.roll;
        let words = self.slots.len().div_ceil(64);
        roll.stale = false;
        roll.rows.clear();
        roll.place.clear();
        roll.place.resize(self.holder_rank.len(), Packed::default());
        roll.always.clear();
        roll.always.resize(words, 0);
        roll.stores.clear();
        roll.attached.clear();
        roll.attached.resize(words, 0);
        let nowhere = End {
            place: NOWHERE,
            answer: 0,
        };
        roll.ends.clear();
        roll.ends.resize(self.slots.len(), nowhere);
        let mut stores: BTreeMap<(String, u32), usize> = BTreeMap::new();
        let mut plans: BTreeMap<*const Plan, u32> = BTreeMap::new();
        for (place, &slot) in self.slots.values().enumerate() {
            let rank = &mut self.ranks[slot as usize];
            rank.place = place as u32;
            for (number, [confirmed, upper]) in &rank.lanes {
                let mut lanes = rank.plan.lanes.iter();
                let lane = lanes.find(|lane| lane.number == *number);
                let tier = lane.map_or(0, |lane| lane.tier as u32 + 1);
                let packed = rank.place << 4 | tier << 1;
                roll.place[*confirmed as usize] = Packed(packed);
                roll.place[*upper as usize] = Packed(packed | 1);
            }
            rank.shared.clear();
            for (lane, holders) in rank.plan.lanes.iter().zip(&rank.in_plan) {
                let store = (!lane.store.is_empty()).then(|| {
                    let next = stores.len();
                    *stores
                        .entry((lane.store.clone(), lane.group))
                        .or_insert(next)
                });
                if let Some(store) = store {
                    roll.attached[place / 64] |= 1 << (place % 64);
                    roll.stores.resize_with(stores.len(), Vec::new);
                    // Who is not believed is not believed of a store either.
                    roll.stores[store].extend(holders.filter(|_| rank.trusted));
                }
                rank.shared.push(store);
            }
            roll.always[place / 64] |= u64::from(rank.always()) << (place % 64);
            let next = plans.len() as u32;
            let plan = *plans.entry(Arc::as_ptr(&rank.plan)).or_insert(next);
            roll.rows.push(Row {
                replica: rank.replica,
                rank: rank.rank,
                slot,
                plan: if rank.plan.plain { plan } else { NO_PLAN },
                prefix: 0,
            });
        }
        roll.any = roll.always.iter().any(|word| *word != 0);
    }

    /// (lane, blocks held with either confidence), ascending.
    pub fn held(&self, replica: u32, rank: u32) -> Result<Vec<(u8, u64)>, Refusal> {
        let rank = &self.ranks[self.slot(replica, rank)? as usize];
        let lanes = rank.lanes.iter();
        let count =
            |holders: &[Holder; 2]| holders.iter().map(|&holder| self.tree.held(holder)).sum();
        Ok(lanes
            .map(|(lane, holders)| (*lane, count(holders)))
            .filter(|(_, held)| *held > 0)
            .collect())
    }

    /// Hashes held, ascending.
    pub fn holdings(
        &self,
        replica: u32,
        rank: u32,
        lane: u32,
        confidence: u8,
    ) -> Result<Vec<u64>, Refusal> {
        let slot = self.slot(replica, rank)?;
        let number = self.lane(replica, lane)?;
        let at = match confidence {
            CONFIRMED => 0,
            UPPER => 1,
            _ => {
                return Err(Refusal::Invalid(format!(
                    "confidence {confidence}; known: 1 (confirmed), 2 (upper)"
                )));
            }
        };
        let holders = self.ranks[slot as usize].lanes.get(&number);
        let mut hashes = holders.map_or_else(Vec::new, |holders| self.tree.holdings(holders[at]));
        hashes.sort_unstable();
        Ok(hashes)
    }

    /// Sizes.
    pub fn counts(&self) -> Counts {
        Counts {
            entries: self.tree.entries(),
            blocks: self.tree.blocks(),
            runs: self.tree.runs(),
            credits: self.credits.len(),
            memory_bytes: self.tree.memory_bytes() + self.credits.memory_bytes(),
            evicted: self.evicted,
        }
    }

    /// Equal profiles share a plan: ranks of one plan that hold the same get the same answer.
    fn plan(&self, profile: &Profile) -> Result<Arc<Plan>, Refusal> {
        let mut known = self.replicas.values();
        if let Some(equal) = known.find(|known| known.profile == *profile) {
            return Ok(Arc::clone(&equal.plan));
        }
        let plan = Plan::new(profile, self.block_tokens).map_err(Refusal::Invalid)?;
        Ok(Arc::new(plan))
    }

    fn look_for_gaps(&mut self) {
        let mut plans = self.replicas.values().map(|replica| &replica.plan);
        self.passes_gaps = plans.any(|plan| plan.passes_gaps);
    }

    fn replica(&self, replica: u32) -> Result<&Replica, Refusal> {
        self.replicas
            .get(&replica)
            .ok_or_else(|| Refusal::Unknown(format!("replica {replica}")))
    }

    fn slot(&self, replica: u32, rank: u32) -> Result<u32, Refusal> {
        let slot = self.slots.get(&(replica, rank)).copied();
        slot.ok_or_else(|| Refusal::Unknown(format!("rank {rank} of replica {replica}")))
    }

    fn slots_of(&self, replica: u32) -> Vec<u32> {
        self.slots
            .range((replica, 0)..=(replica, u32::MAX))
            .map(|(_, slot)| *slot)
            .collect()
    }

    fn known(&self, replica: u32, rank: u32, lane: u32) -> Option<(u32, u8, [Holder; 2])> {
        let same = |known: &Known| (known.replica, known.rank, known.lane) == (replica, rank, lane);
        let known = self.known.find(Known::key(replica, rank, lane), same)?;
        Some((known.slot, known.number, known.holders))
    }

    fn know(&mut self, replica: u32, rank: u32, lane: u32, slot: u32, number: u8) -> [Holder; 2] {
        let holders = self.holders(slot, number);
        let known = Known {
            replica,
            rank,
            lane,
            slot,
            number,
            holders,
        };
        let key = |known: &Known| Known::key(known.replica, known.rank, known.lane);
        self.known.insert_unique(key(&known), known, key);
        holders
    }

    fn lane(&self, replica: u32, lane: u32) -> Result<u8, Refusal> {
        let lanes = &self.replica(replica)?.profile.lanes;
        let declared = lanes
            .iter()
            .find(|declared| u32::from(declared.number) == lane);
        let number = declared.map(|declared| declared.number);
        number.ok_or_else(|| Refusal::Unknown(format!("lane {lane} of replica {replica}")))
    }

    fn covered(&self, prompt: u64, hashes: usize) -> Result<(), Refusal> {
        let covered = hashes as u64 * u64::from(self.block_tokens);
        if prompt < covered {
            return Err(Refusal::Invalid(format!(
                "a prompt of {prompt} tokens with {hashes} hashes, which cover {covered}"
            )));
        }
        Ok(())
    }

    fn holders(&mut self, slot: u32, lane: u8) -> [Holder; 2] {
        if let Some(holders) = self.ranks[slot as usize].lanes.get(&lane) {
            return *holders;
        }
        let holders = [self.new_holder(slot), self.new_holder(slot)];
        self.roll.stale = true;
        let rank = &mut self.ranks[slot as usize];
        rank.lanes.insert(lane, holders);
        let plan = self
            .replicas
            .get(&rank.replica)
            .map(|replica| Arc::clone(&replica.plan));
        if let Some(plan) = plan {
            self.arrange(slot, &plan);
        }
        holders
    }

    fn new_holder(&mut self, slot: u32) -> Holder {
        let holder = self
            .free_holders
            .pop()
            .unwrap_or_else(|| self.tree.add_holder());
        self.holder_rank
            .resize(self.holder_rank.len().max(holder as usize + 1), NO_RANK);
        self.holder_rank[holder as usize] = slot;
        holder
    }

    fn retire(&mut self, holders: [Holder; 2]) {
        for holder in holders {
            self.tree.clear(holder);
            self.holder_rank[holder as usize] = NO_RANK;
            self.free_holders.push(holder);
        }
    }

    fn arrange(&mut self, slot: u32, plan: &Arc<Plan>) {
        let rank = &mut self.ranks[slot as usize];
        rank.plan = Arc::clone(plan);
        rank.in_plan = plan
            .lanes
            .iter()
            .map(|lane| rank.lanes.get(&lane.number).copied())
            .collect();
    }

    /// A HOLD that counts in `predicted` makes credits for the block redundant: the engine itself has spoken. It is
    /// looked for in the lanes that a credit speaks of first, the attention lanes of the GPU.
    fn ends_credits(&self, replica: u32, number: u8, confidence: u8) -> bool {
        let Some(replica) = self.replicas.get(&replica) else {
            return false;
        };
        let lanes = &replica.profile.lanes;
        let attention = lanes
            .iter()
            .any(|lane| lane.tier == 0 && lane.class == Class::Attention);
        lanes
            .iter()
            .filter(|lane| lane.number == number)
            .any(|lane| {
                lane.tier == 0
                    && (lane.class == Class::Attention || !attention)
                    && (confidence == CONFIRMED || lane.upper_in_predicted)
            })
    }

    fn read_credits(&mut self, hashes: &[u64]) {
        for slot in self.credited.drain(..) {
            let bits = &mut self.credit_bits[slot as usize];
            bits.attention.clear();
            bits.state.clear();
            bits.possible.clear();
        }
        if self.credits.is_empty() {
            return;
        }
        self.credit_bits.resize_with(
            self.ranks.len().max(self.credit_bits.len()),
            CreditBits::default,
        );
        let words = hashes.len().div_ceil(64);
        for (at, &hash) in hashes.iter().enumerate() {
            let Some(covers) = self.credits.covers(hash) else {
                break;
            };
            for cover in covers {
                let bits = &mut self.credit_bits[cover.rank as usize];
                if bits.attention.is_empty() && bits.possible.is_empty() {
                    self.credited.push(cover.rank);
                }
                for (count, bits) in [
                    (cover.attention, &mut bits.attention),
                    (cover.state, &mut bits.state),
                    (cover.possible, &mut bits.possible),
                ] {
                    if count > 0 {
                        bits.resize(words, 0);
                        bits::copy(bits, at, 1);
                    }
                }
            }
        }
    }

    fn evict(&mut self, entries: u64) {
        let (losers, gone) = self.tree.evict(entries);
        self.evicted += gone;
        for holder in losers {
            let slot = self.holder_rank[holder as usize];
            if let Some(rank) = self.ranks.get_mut(slot as usize) {
                self.roll.stale |= !rank.lossy;
                rank.lossy = true;
            }
        }
    }
}

/// Blocks of the prompt at hand that any of these holders holds: confirmed, and UPPER.
fn union(found: &Found, told: &[[Holder; 2]], blocks: u64) -> [Vec<u64>; 2] {
    let words = blocks.div_ceil(64);
    [0, 1].map(|level: usize| {
        let word = |at| {
            told.iter()
                .fold(0, |word, holders| word | found.of(holders[level]).word(at))
        };
        (0..words).map(word).collect()
    })
}

impl Known {
    fn key(replica: u32, rank: u32, lane: u32) -> u64 {
        spread(u64::from(replica) << 32 | u64::from(rank) << 6 ^ u64::from(lane))
    }
}

impl Rank {
    /// It may reuse something of a prompt of which it holds nothing.
    fn always(&self) -> bool {
        !self.trusted || !self.complete || self.lossy || !self.plan.needs_blocks
    }

    fn answer(&self, question: &Question<'_>) -> Match {
        let mut answer = Match {
            replica: self.replica,
            rank: self.rank,
            ..Match::default()
        };
        if self.trusted {
            let views = question.views();
            answer.lower = views.lower.iter().sum();
            answer.tiers = views.predicted;
            answer.predicted = views.predicted.iter().sum();
            answer.upper = views.upper.iter().sum();
            answer.credited = answer.predicted - answer.lower.min(answer.predicted);
        }
        if !self.trusted || !self.complete || self.lossy {
            answer.upper = question.plan.most(question.prompt, self.trusted);
        }
        answer
    }
}
