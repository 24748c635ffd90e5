//! Hash, mirror and index under any calls with any bytes, beside the plainest models. No panic, whatever comes.
//!
//! The same cases every time; `PROPTEST_CASES` and `PROPTEST_RNG_SEED` make other and more.

use std::collections::{BTreeMap, BTreeSet};

use _native::hash::{self, Media};
use _native::index::{CONFIRMED, Index, UPPER};
use _native::mirror::nodes::{Delta, Op};
use _native::mirror::{self, Mirror, Stored};
use _native::resume::{Class, Lane, Profile};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const BLOCK: u32 = 4;

fn config() -> ProptestConfig {
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(1);
    }
    config
}

// Hashing.

/// The recipe as docs/protocol.md tells it, block by block.
fn naive_chain(parent: u64, tokens: &[u8], block: usize, media: &[Media], pairs: bool) -> Vec<u64> {
    let width = block + usize::from(pairs);
    let mut hashes = Vec::new();
    let mut hash = parent;
    for start in (0..).step_by(block) {
        let Some(block_tokens) = tokens.get(start * 4..(start + width) * 4) else {
            return hashes;
        };
        let mut bytes = hash.to_le_bytes().to_vec();
        bytes.extend(block_tokens);
        for (index, key) in media {
            if (start..start + block).contains(&(*index as usize)) {
                bytes.extend((*index - start as u32).to_le_bytes());
                bytes.extend((key.len() as u32).to_le_bytes());
                bytes.extend(key);
            }
        }
        hash = xxh3_64_with_seed(&bytes, 0x7366_6c65_6574_3031).max(1);
        hashes.push(hash);
    }
    hashes
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_hash_of_any_tokens_is_the_recipe_s(
        parent in any::<u64>(),
        tokens in vec(any::<u8>(), 0..600),
        block in prop_oneof![Just(16_usize), 1..40_usize],
        offsets in vec(0..200_u32, 0..5),
        key in vec(any::<u8>(), 0..40),
        pairs in any::<bool>(),
    ) {
        let tokens = &tokens[..tokens.len() / 4 * 4];
        let mut media: Vec<Media> = offsets
            .iter()
            .map(|offset| (*offset, key.clone().into_boxed_slice()))
            .collect();
        media.sort_by_key(|(offset, _)| *offset);
        let hashes = hash::chain(parent, tokens, block, &media, pairs);
        prop_assert_eq!(&hashes, &naive_chain(parent, tokens, block, &media, pairs));
        let half = &tokens[..tokens.len() / 8 * 4];
        let shorter = hash::chain(parent, half, block, &media, pairs);
        prop_assert_eq!(&hashes[..shorter.len()], &shorter[..]);
    }

    #[test]
    fn fields_of_a_namespace_do_not_run_into_one_another(
        words in [".{0,12}", ".{0,12}", ".{0,12}"],
        cut in 0..12_usize,
    ) {
        let [model, adapter, salt] = &words;
        let root = hash::namespace_root(model, adapter, salt, false);
        prop_assert_ne!(root, hash::namespace_root(model, adapter, salt, true));
        let joined = format!("{model}{adapter}");
        if let Some((left, right)) = joined.split_at_checked(cut)
            && left != model
        {
            prop_assert_ne!(root, hash::namespace_root(left, right, salt, false));
        }
    }
}

// The mirror.

const LANES: [(u32, bool); 3] = [(0, true), (1, false), (63, true)];

#[derive(Clone, Debug)]
enum Call {
    Store {
        lane: u32,
        first: u8,
        count: u8,
        rooted: bool,
        unit: u32,
        placeholder: bool,
        opaque: bool,
        doubtful: bool,
        masked: u32,
        whole: bool,
        places_only: bool,
        branch: u8,
    },
    StoreAnything {
        lane: u32,
        hashes: Vec<u8>,
        width: usize,
        parent: Option<Vec<u8>>,
        tokens: Vec<u8>,
        unit: u32,
        masked: u32,
        media: Vec<(u32, u8)>,
    },
    Remove(u32, u8, u8),
    RemoveAnything(u32, Vec<u8>, usize),
    Clear(Vec<u32>),
    Suspect(Vec<u32>),
    Expire,
    Snapshot,
    Part(usize),
}

fn lane() -> impl Strategy<Value = u32> {
    prop_oneof![9 => Just(0), 6 => Just(1), 3 => Just(63), 1 => any::<u32>()]
}

fn call() -> impl Strategy<Value = Call> {
    let unit = || prop_oneof![5 => Just(BLOCK), 2 => Just(2), 2 => Just(8), 1 => any::<u32>()];
    let lanes = || vec(lane(), 0..3);
    prop_oneof![
        12 => (
            (lane(), 0..12_u8, 1..4_u8, any::<bool>(), unit()),
            (0..8_u8, 0..8_u8, 0..8_u8, 0..8_u8),
            (prop_oneof![5 => Just(0_u32), 1 => 1..4_u32], any::<bool>(), 0..8_u8),
        ).prop_map(|(
            (lane, first, count, rooted, unit),
            (named, opaque, doubtful, branch),
            (masked, whole, places),
        )| {
            Call::Store {
                lane, first, count, rooted, unit, masked, whole,
                placeholder: named == 0,
                opaque: opaque == 0,
                doubtful: doubtful == 0,
                places_only: places == 0,
                branch: u8::from(branch == 0),
            }
        }),
        2 => (
            (lane(), vec(any::<u8>(), 0..70), prop_oneof![Just(8_usize), Just(32), 0..40_usize]),
            (proptest::option::of(vec(any::<u8>(), 0..33)), vec(any::<u8>(), 0..70), unit()),
            (prop_oneof![3 => Just(0_u32), 1 => any::<u32>()], vec((any::<u32>(), any::<u8>()), 0..3)),
        ).prop_map(|((lane, hashes, width), (parent, tokens, unit), (masked, media))| {
            Call::StoreAnything { lane, hashes, width, parent, tokens, unit, masked, media }
        }),
        6 => (lane(), 0..12_u8, 1..4_u8).prop_map(|(l, first, count)| Call::Remove(l, first, count)),
        1 => (lane(), vec(any::<u8>(), 0..40), 0..40_usize)
            .prop_map(|(l, hashes, width)| Call::RemoveAnything(l, hashes, width)),
        1 => lanes().prop_map(Call::Clear),
        1 => lanes().prop_map(Call::Suspect),
        1 => Just(Call::Expire),
        1 => Just(Call::Snapshot),
        2 => (0..6_usize).prop_map(Call::Part),
    ]
}

/// Engine hashes of a run of blocks, packed.
fn keys(first: u8, count: u8) -> Vec<u8> {
    (0..count)
        .flat_map(|at| u64::from(first + at + 1).to_le_bytes())
        .collect()
}

/// Whoever is told the deltas: (lane, hash) and how surely it is held.
#[derive(Clone, Default)]
struct Told(BTreeMap<(u8, u64), u8>);

impl Told {
    fn hear(&mut self, deltas: &[Delta]) {
        for delta in deltas {
            match delta.op {
                Op::Clear => self.0.retain(|(lane, _), _| *lane != delta.lane),
                Op::Drop => {
                    for hash in &delta.hashes {
                        self.0.remove(&(delta.lane, *hash));
                    }
                }
                Op::Hold => {
                    assert!(delta.confidence == CONFIRMED || delta.confidence == UPPER);
                    for hash in &delta.hashes {
                        assert_ne!(*hash, hash::NO_BLOCK);
                        self.0.insert((delta.lane, *hash), delta.confidence);
                    }
                }
            }
        }
    }

    fn of(&self, lane: u32, confidence: u8) -> Vec<u64> {
        let of_lane = self.0.iter().filter(|((of, _), _)| u32::from(*of) == lane);
        of_lane
            .filter(|(_, sure)| **sure == confidence)
            .map(|((_, hash), _)| *hash)
            .collect()
    }
}

/// The mirror, who followed it from the start, who reads a snapshot, and the copies of each engine block.
struct Watched {
    mirror: Mirror,
    told: Told,
    reader: Option<(u64, Told)>,
    /// As long as no orphan is dropped.
    copies: BTreeMap<(u32, Vec<u8>), u32>,
    max_units: u64,
    max_orphans: u64,
    /// Tokens of a store beyond its blocks.
    extra: u32,
}

impl Watched {
    fn new(max_units: usize, max_orphans: usize, pairs: bool) -> Watched {
        let settings = mirror::Settings {
            block_tokens: BLOCK,
            max_units,
            max_orphans,
            orphan_ttl_s: 5.0,
            pairs,
        };
        let mut mirror = Mirror::new("m", settings);
        for (lane, multiset) in LANES {
            mirror.add_lane(lane, multiset).expect("a new lane");
        }
        Watched {
            mirror,
            told: Told::default(),
            reader: None,
            copies: BTreeMap::new(),
            max_units: max_units as u64,
            max_orphans: max_orphans as u64,
            extra: u32::from(pairs),
        }
    }

    fn hear(&mut self, deltas: &[Delta]) {
        self.told.hear(deltas);
        if let Some((_, reader)) = &mut self.reader {
            reader.hear(deltas);
        }
    }

    fn store(&mut self, event: &Stored<'_>) {
        match self.mirror.stored(event) {
            Ok(deltas) => {
                self.hear(&deltas);
                if event.places_only {
                    return;
                }
                let multiset = LANES.contains(&(event.lane, true));
                for key in event.hashes.chunks_exact(event.width) {
                    let copies = self.copies.entry((event.lane, key.to_vec())).or_default();
                    *copies = if multiset { *copies + 1 } else { 1 };
                }
            }
            Err(_) => self.check("a refused store changes nothing"),
        }
    }

    fn remove(&mut self, lane: u32, hashes: &[u8], width: usize) {
        let Ok(deltas) = self.mirror.removed(lane, hashes, width) else {
            return self.check("a refused removal changes nothing");
        };
        self.hear(&deltas);
        for key in hashes.chunks_exact(width) {
            let at = (lane, key.to_vec());
            if let Some(copies) = self.copies.get_mut(&at) {
                *copies -= 1;
                if *copies == 0 {
                    self.copies.remove(&at);
                }
            }
        }
    }

    fn call(&mut self, call: &Call, now: f64) {
        match call {
            Call::Store {
                lane,
                first,
                count,
                rooted,
                unit,
                placeholder,
                opaque,
                doubtful,
                masked,
                whole,
                places_only,
                branch,
            } => {
                let parent = (*first > 0 && !rooted).then(|| keys(first - 1, 1));
                let tokens = if *placeholder || *unit > 8 {
                    Vec::new()
                } else {
                    let start = u32::from(*first) * unit;
                    let end = start + (u32::from(*count) + masked) * unit + self.extra;
                    (start..end)
                        .flat_map(|token| (token + 1000 * u32::from(*branch)).to_le_bytes())
                        .collect()
                };
                self.store(&Stored {
                    lane: *lane,
                    hashes: &keys(*first, *count),
                    width: 8,
                    parent: parent.as_deref(),
                    tokens: &tokens,
                    unit: *unit,
                    now,
                    adapter: "",
                    cache_salt: "",
                    media: &[],
                    opaque: *opaque,
                    doubtful: *doubtful,
                    masked: *masked,
                    untold: false,
                    whole: *whole,
                    computed: false,
                    places_only: *places_only,
                });
            }
            Call::StoreAnything {
                lane,
                hashes,
                width,
                parent,
                tokens,
                unit,
                masked,
                media,
            } => {
                let media: Vec<Media> = media
                    .iter()
                    .map(|(index, key)| (*index, Box::from([*key])))
                    .collect();
                self.store(&Stored {
                    lane: *lane,
                    hashes,
                    width: *width,
                    parent: parent.as_deref(),
                    tokens,
                    unit: *unit,
                    now,
                    adapter: "a",
                    cache_salt: "s",
                    media: &media,
                    opaque: false,
                    doubtful: false,
                    masked: *masked,
                    untold: false,
                    whole: false,
                    computed: false,
                    places_only: false,
                });
            }
            Call::Remove(lane, first, count) => self.remove(*lane, &keys(*first, *count), 8),
            Call::RemoveAnything(lane, hashes, width) => self.remove(*lane, hashes, *width),
            Call::Clear(lanes) => {
                if let Ok(deltas) = self.mirror.cleared(lanes) {
                    self.hear(&deltas);
                    self.copies.retain(|(lane, _), _| !lanes.contains(lane));
                }
            }
            Call::Suspect(lanes) => {
                if let Ok(deltas) = self.mirror.suspect(lanes) {
                    self.hear(&deltas);
                }
            }
            Call::Expire => {
                self.mirror.expire(now);
            }
            Call::Snapshot => {
                if let Some((number, _)) = self.reader.take() {
                    self.mirror.end_snapshot(number);
                }
                self.reader = Some((self.mirror.begin_snapshot(), Told::default()));
            }
            Call::Part(size) => self.read(*size),
        }
        self.check("what is told is what is held");
    }

    /// The next part of the snapshot: at its end the reader knows what is held.
    fn read(&mut self, size: usize) {
        let Some((number, mut reader)) = self.reader.take() else {
            return;
        };
        match self.mirror.next_snapshot(number, size) {
            Ok(part) if part.is_empty() => assert_eq!(reader.0, self.told.0),
            Ok(part) => {
                assert!(part.iter().map(|delta| delta.hashes.len()).sum::<usize>() <= size);
                reader.hear(&part);
                self.reader = Some((number, reader));
            }
            Err(_) => {
                assert_eq!(size, 0);
                self.reader = Some((number, reader));
            }
        }
    }

    fn check(&self, what: &str) {
        for (lane, _) in LANES {
            for confidence in [CONFIRMED, UPPER] {
                let held = self.mirror.holdings(lane, confidence).expect("a lane");
                assert_eq!(self.told.of(lane, confidence), held, "{what}, lane {lane}");
            }
        }
        let (sizes, totals) = (self.mirror.sizes(), self.mirror.totals());
        let known = sizes.units_placed + sizes.orphans + sizes.opaque_units;
        assert!(known <= self.max_units, "{sizes:?}");
        assert!(sizes.orphans <= self.max_orphans, "{sizes:?}");
        if totals.orphans_dropped + totals.orphans_expired == 0 {
            let blocks: BTreeSet<&Vec<u8>> = self.copies.keys().map(|(_, key)| key).collect();
            assert_eq!(sizes.units_held, blocks.len() as u64, "{what}: {sizes:?}");
        }
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whoever_hears_a_mirror_s_deltas_knows_what_it_holds(
        calls in vec(call(), 1..80),
        max_units in prop_oneof![Just(1000_usize), 0..20_usize],
        max_orphans in prop_oneof![Just(1000_usize), 0..6_usize],
        pairs in any::<bool>(),
    ) {
        let mut watched = Watched::new(max_units, max_orphans, pairs);
        for (at, call) in calls.iter().enumerate() {
            watched.call(call, at as f64);
        }
        watched.mirror.reset();
        watched.told = Told::default();
        watched.copies.clear();
        watched.check("a new life begins empty");
    }
}

// The index.

#[derive(Clone, Debug)]
enum Change {
    Hold(u32, u32, u8, u64, Vec<u64>),
    Drop(u32, u32, Vec<u64>),
    Clear(u32, Option<u32>),
    Credit(u8, u32, Vec<u64>),
    EndCredit(u8),
    Rank(u32, bool, bool),
    Remove,
    Ask(Vec<u64>, u32),
}

/// Blocks of a prompt on one of two branches, or any numbers.
fn prompt() -> impl Strategy<Value = Vec<u64>> {
    let tree = (0..9_u64, 0..2_u64, 0..9_usize).prop_map(|(fork, branch, length)| {
        (0..length as u64)
            .map(|at| {
                1 + at
                    + if at >= fork {
                        1000 * (1 + branch * 10 + fork)
                    } else {
                        0
                    }
            })
            .collect()
    });
    prop_oneof![8 => tree, 1 => vec(any::<u64>(), 0..6), 1 => vec(0..12_u64, 0..6)]
}

fn change() -> impl Strategy<Value = Change> {
    let rank = || prop_oneof![8 => 0..2_u32, 1 => any::<u32>()];
    let lane = || prop_oneof![8 => 0..2_u32, 1 => any::<u32>()];
    let parent = prop_oneof![2 => Just(0_u64), 2 => 0..12_u64, 1 => any::<u64>()];
    prop_oneof![
        10 => (rank(), lane(), 1..3_u8, 0..40_u8, parent, prompt()).prop_map(
            |(rank, lane, sure, odd, parent, hashes)| {
                Change::Hold(rank, lane, if odd == 0 { 7 } else { sure }, parent, hashes)
            }),
        4 => (rank(), lane(), prompt()).prop_map(|(r, l, hashes)| Change::Drop(r, l, hashes)),
        1 => (rank(), proptest::option::of(lane())).prop_map(|(r, l)| Change::Clear(r, l)),
        3 => (0..4_u8, rank(), prompt()).prop_map(|(name, r, hashes)| Change::Credit(name, r, hashes)),
        2 => (0..4_u8).prop_map(Change::EndCredit),
        1 => (rank(), any::<bool>(), any::<bool>()).prop_map(|(r, t, c)| Change::Rank(r, t, c)),
        1 => Just(Change::Remove),
        8 => (prompt(), 0..9_u32).prop_map(|(hashes, more)| Change::Ask(hashes, more)),
    ]
}

fn plain(number: u8, tier: usize, upper_in_predicted: bool) -> Lane {
    Lane {
        number,
        tier,
        class: Class::Attention,
        group: 0,
        unit: BLOCK,
        upper_in_predicted,
        store: String::new(),
    }
}

/// One replica that changes, and one whose holdings must not.
struct Pair {
    index: Index,
    replica: u32,
    calm: u32,
    profile: Profile,
    held: BTreeMap<(u32, u32), BTreeMap<u64, u8>>,
}

const CALM: [u64; 4] = [1, 2, 3, 4];

impl Pair {
    fn new(upper_in_predicted: bool) -> Pair {
        let profile = Profile {
            lanes: vec![plain(0, 0, upper_in_predicted), plain(1, 1, true)],
            ..Profile::default()
        };
        let mut index = Index::new(BLOCK, 1_000_000);
        let replica = index.add_replica(&profile).expect("units that fit");
        let calm = index.add_replica(&profile).expect("units that fit");
        index.set_rank(calm, 0, true, true).expect("known");
        let new = index
            .hold(calm, 0, 0, CONFIRMED, 0, &CALM)
            .expect("a known lane");
        assert_eq!(new, 4);
        let mut pair = Pair {
            index,
            replica,
            calm,
            profile,
            held: BTreeMap::new(),
        };
        pair.add_rank(0, true, true);
        pair
    }

    fn add_rank(&mut self, rank: u32, trusted: bool, complete: bool) {
        let added = self.index.set_rank(self.replica, rank, trusted, complete);
        added.expect("a known replica");
        for lane in [0, 1] {
            self.held.entry((rank, lane)).or_default();
        }
    }

    fn apply(&mut self, change: &Change) {
        let replica = self.replica;
        match change {
            Change::Hold(rank, lane, sure, parent, hashes) => {
                let known = self.held.get_mut(&(*rank, *lane));
                let allowed = known.is_some() && *sure <= UPPER && !hashes.contains(&0);
                let new = self
                    .index
                    .hold(replica, *rank, *lane, *sure, *parent, hashes);
                assert_eq!(new.is_ok(), allowed, "{new:?}");
                if let (Ok(new), Some(known)) = (new, known) {
                    let other = |hash: &&u64| known.get(hash) != Some(sure);
                    let distinct: BTreeSet<&u64> = hashes.iter().filter(other).collect();
                    assert_eq!(new, distinct.len() as u64);
                    known.extend(hashes.iter().map(|hash| (*hash, *sure)));
                }
            }
            Change::Drop(rank, lane, hashes) => {
                let known = self.held.get_mut(&(*rank, *lane));
                let dropped = self.index.drop(replica, *rank, *lane, hashes);
                assert_eq!(dropped.is_ok(), known.is_some());
                if let (Ok(dropped), Some(known)) = (dropped, known) {
                    let before = known.len();
                    known.retain(|hash, _| !hashes.contains(hash));
                    assert_eq!(dropped, (before - known.len()) as u64);
                }
            }
            Change::Clear(rank, lane) => {
                if let Ok(cleared) = self.index.clear(replica, *rank, *lane) {
                    let mut count = 0;
                    for ((of, number), blocks) in &mut self.held {
                        if of == rank && lane.is_none_or(|lane| lane == *number) {
                            count += blocks.len() as u64;
                            blocks.clear();
                        }
                    }
                    assert_eq!(cleared, count);
                }
            }
            Change::Credit(name, rank, hashes) => {
                let tokens = hashes.len() as u64 * u64::from(BLOCK);
                let name = name.to_string();
                let _ = self
                    .index
                    .open_credit(&name, replica, *rank, hashes.clone(), tokens);
            }
            Change::EndCredit(name) => {
                self.index.close_credit(&name.to_string());
            }
            Change::Rank(rank, trusted, complete) => self.add_rank(*rank, *trusted, *complete),
            Change::Remove => {
                self.index.remove_replica(replica).expect("known");
                self.held.clear();
                self.replica = self.index.add_replica(&self.profile).expect("as before");
                self.add_rank(0, true, true);
            }
            Change::Ask(hashes, more) => self.ask(hashes, *more),
        }
    }

    /// Sane answers about all, the very answer about the calm one.
    fn ask(&mut self, hashes: &[u64], more: u32) {
        let prompt = hashes.len() as u64 * u64::from(BLOCK) + u64::from(more);
        let matches = self.index.find(hashes, prompt, false).expect("enough");
        for found in &matches {
            assert!(found.lower <= found.predicted && found.predicted <= found.upper);
            assert!(found.upper <= prompt);
            assert_eq!(found.tiers.iter().sum::<u64>(), found.predicted);
            assert!(found.credited <= found.predicted);
        }
        let places: Vec<(u32, u32)> = matches.iter().map(|m| (m.replica, m.rank)).collect();
        assert!(places.is_sorted_by(|one, next| one < next));
        let prefix = hashes.iter().take_while(|hash| CALM.contains(hash)).count() as u64;
        let block = u64::from(BLOCK);
        // The last token of a prompt is computed again.
        let most = prompt.saturating_sub(1) / block * block;
        let calm = matches.iter().find(|found| found.replica == self.calm);
        let lower = calm.map_or(0, |found| found.lower);
        assert_eq!(lower, (prefix * block).min(most));
        assert_eq!(calm.map_or(0, |found| found.upper), lower);
        for short in 1..=prompt.min(2) {
            let few = hashes.len() as u64 * block;
            if few >= short {
                assert!(self.index.find(hashes, few - short, false).is_err());
            }
        }
    }

    fn check(&self) {
        for ((rank, lane), blocks) in &self.held {
            for confidence in [CONFIRMED, UPPER] {
                let held = self.index.holdings(self.replica, *rank, *lane, confidence);
                let sure = blocks.iter().filter(|(_, sure)| **sure == confidence);
                let want: Vec<u64> = sure.map(|(hash, _)| *hash).collect();
                assert_eq!(held.expect("a known lane"), want, "rank {rank} lane {lane}");
            }
        }
        let entries: usize = self.held.values().map(BTreeMap::len).sum();
        assert_eq!(self.index.counts().entries, (entries + CALM.len()) as u64);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn an_index_knows_what_it_was_told_and_answers_no_more(
        changes in vec(change(), 1..60),
        upper_in_predicted in any::<bool>(),
    ) {
        let mut pair = Pair::new(upper_in_predicted);
        for change in &changes {
            pair.apply(change);
            pair.check();
        }
    }
}
