//! The Python face; `_native.pyi` is its contract.

use std::collections::BTreeMap;

use pyo3::create_exception;
use pyo3::exceptions::{PyKeyError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::hash::{self, Media};
use crate::index::{self, Refusal};
use crate::mirror::{self, nodes};
use crate::resume::{Class, Lane, Rule, TIERS};

create_exception!(
    servingfleet_core._native,
    Rejected,
    PyValueError,
    "An event that the mirror can't take. `args` is (reason, detail)."
);

/// Largest canonical block, in tokens.
const MAX_BLOCK_TOKENS: u32 = 1 << 20;

/// An integer that Python may have made too large or negative: a ValueError, not an OverflowError.
struct Int<T>(T);

impl<'py, T> FromPyObject<'_, 'py> for Int<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<T>() {
            Ok(value) => Ok(Int(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Err(PyValueError::new_err("a number out of range"))
            }
            Err(error) => Err(error),
        }
    }
}

type PyMedia = Vec<(Int<u32>, Vec<u8>)>;

fn media_of(media: PyMedia) -> PyResult<Vec<Media>> {
    let media: Vec<Media> = media
        .into_iter()
        .map(|(Int(at), key)| (at, key.into()))
        .collect();
    if media.is_sorted_by_key(|(at, _)| at) {
        return Ok(media);
    }
    Err(PyValueError::new_err("media that do not ascend"))
}

fn unpack(hashes: &[u8]) -> PyResult<Vec<u64>> {
    let (whole, rest) = hashes.as_chunks::<8>();
    if rest.is_empty() {
        return Ok(whole
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect());
    }
    Err(PyValueError::new_err(format!(
        "{} bytes of hashes, 8 bytes each",
        hashes.len()
    )))
}

fn pack<'py>(py: Python<'py>, hashes: &[u64]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}

fn check_block(block_tokens: u32) -> PyResult<()> {
    if (1..=MAX_BLOCK_TOKENS).contains(&block_tokens) {
        return Ok(());
    }
    let text = format!("blocks of {block_tokens} tokens; at least 1, at most {MAX_BLOCK_TOKENS}");
    Err(PyValueError::new_err(text))
}

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> PyErr {
        match refusal {
            Refusal::Unknown(text) => PyKeyError::new_err(format!("unknown {text}")),
            Refusal::Invalid(text) => PyValueError::new_err(text),
        }
    }
}

impl From<mirror::Refusal> for PyErr {
    fn from(refusal: mirror::Refusal) -> PyErr {
        match refusal {
            mirror::Refusal::Unknown(text) => PyKeyError::new_err(format!("unknown {text}")),
            mirror::Refusal::Invalid(text) => PyValueError::new_err(text),
            mirror::Refusal::Rejected(reason, detail) => Rejected::new_err((reason, detail)),
        }
    }
}

#[pyfunction]
#[pyo3(signature = (model, adapter="", cache_salt="", pairs=false))]
fn namespace_root(model: &str, adapter: &str, cache_salt: &str, pairs: bool) -> u64 {
    hash::namespace_root(model, adapter, cache_salt, pairs)
}

#[pyfunction]
#[pyo3(signature = (root, tokens, block_tokens, media=vec![], pairs=false), text_signature = "(root, tokens, block_tokens, media=(), pairs=False)")]
fn block_hashes<'py>(
    py: Python<'py>,
    root: Int<u64>,
    tokens: &[u8],
    block_tokens: Int<u32>,
    media: PyMedia,
    pairs: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    check_block(block_tokens.0)?;
    let media = media_of(media)?;
    let count = tokens.len() / 4;
    if !tokens.len().is_multiple_of(4) {
        return Err(PyValueError::new_err(format!(
            "{} bytes of tokens, 4 bytes each",
            tokens.len()
        )));
    }
    if let Some((at, _)) = media.iter().find(|(at, _)| *at as usize >= count) {
        return Err(PyValueError::new_err(format!(
            "media at token {at} of {count}"
        )));
    }
    let hashes = hash::chain(root.0, tokens, block_tokens.0 as usize, &media, pairs);
    Ok(pack(py, &hashes))
}

/// A change of absolute presence.
#[pyclass(frozen, module = "servingfleet_core._native")]
struct Delta {
    delta: nodes::Delta,
}

#[pymethods]
impl Delta {
    #[getter]
    fn op(&self) -> u8 {
        self.delta.op as u8
    }

    #[getter]
    fn lane(&self) -> u8 {
        self.delta.lane
    }

    #[getter]
    fn confidence(&self) -> u8 {
        self.delta.confidence
    }

    #[getter]
    fn parent(&self) -> u64 {
        self.delta.parent
    }

    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        pack(py, &self.delta.hashes)
    }

    fn __repr__(&self) -> String {
        let nodes::Delta {
            op,
            lane,
            confidence,
            parent,
            hashes,
        } = &self.delta;
        let count = hashes.len();
        format!(
            "<Delta {op:?} lane={lane} confidence={confidence} parent={parent:#x} hashes={count}>"
        )
    }
}

fn deltas(deltas: Vec<nodes::Delta>) -> Vec<Delta> {
    deltas.into_iter().map(|delta| Delta { delta }).collect()
}

fn numbers(lanes: Vec<Int<u32>>) -> Vec<u32> {
    lanes.into_iter().map(|lane| lane.0).collect()
}

/// What one rank of one engine holds now, by engine hash, placed in the canonical tree.
#[pyclass(module = "servingfleet_core._native")]
struct Mirror {
    mirror: mirror::Mirror,
}

#[pymethods]
impl Mirror {
    #[new]
    #[pyo3(signature = (model, block_tokens, *, max_units=Int(4_000_000), max_orphans=Int(10_000), orphan_ttl_s=5.0, pairs=false), text_signature = "(model, block_tokens, *, max_units=4000000, max_orphans=10000, orphan_ttl_s=5.0, pairs=False)")]
    fn new(
        model: &str,
        block_tokens: Int<u32>,
        max_units: Int<u32>,
        max_orphans: Int<u32>,
        orphan_ttl_s: f64,
        pairs: bool,
    ) -> PyResult<Self> {
        check_block(block_tokens.0)?;
        if orphan_ttl_s.is_nan() || orphan_ttl_s < 0.0 {
            return Err(PyValueError::new_err(format!(
                "orphans that live {orphan_ttl_s} s"
            )));
        }
        let settings = mirror::Settings {
            block_tokens: block_tokens.0,
            max_units: max_units.0 as usize,
            max_orphans: max_orphans.0 as usize,
            orphan_ttl_s,
            pairs,
        };
        Ok(Mirror {
            mirror: mirror::Mirror::new(model, settings),
        })
    }

    #[pyo3(signature = (lane, *, multiset))]
    fn add_lane(&mut self, lane: Int<u32>, multiset: bool) -> PyResult<()> {
        Ok(self.mirror.add_lane(lane.0, multiset)?)
    }

    #[pyo3(signature = (lane, hashes, width, parent, tokens, unit_tokens, now, *, adapter="", cache_salt="", media=vec![], opaque=false, doubtful=false, masked=Int(0), untold=false, whole=false, computed=false, places_only=false), text_signature = "($self, lane, hashes, width, parent, tokens, unit_tokens, now, *, adapter='', cache_salt='', media=(), opaque=False, doubtful=False, masked=0, untold=False, whole=False, computed=False, places_only=False)")]
    #[allow(clippy::too_many_arguments)] // the contract's own
    fn stored(
        &mut self,
        lane: Int<u32>,
        hashes: &[u8],
        width: Int<u32>,
        parent: Option<&[u8]>,
        tokens: &[u8],
        unit_tokens: Int<u32>,
        now: f64,
        adapter: &str,
        cache_salt: &str,
        media: PyMedia,
        opaque: bool,
        doubtful: bool,
        masked: Int<u32>,
        untold: bool,
        whole: bool,
        computed: bool,
        places_only: bool,
    ) -> PyResult<Vec<Delta>> {
        let event = mirror::Stored {
            lane: lane.0,
            hashes,
            width: width.0 as usize,
            parent,
            tokens,
            unit: unit_tokens.0,
            now,
            adapter,
            cache_salt,
            media: &media_of(media)?,
            opaque,
            doubtful,
            masked: masked.0,
            untold,
            whole,
            computed,
            places_only,
        };
        Ok(deltas(self.mirror.stored(&event)?))
    }

    fn place(&self, hash: &[u8]) -> Option<(u64, u32)> {
        self.mirror.place(hash)
    }

    fn holds(&self, lane: Int<u32>, hash: &[u8]) -> PyResult<bool> {
        Ok(self.mirror.holds(lane.0, hash)?)
    }

    fn copies(&self, lane: Int<u32>) -> PyResult<(u64, u64)> {
        Ok(self.mirror.copies(lane.0)?)
    }

    #[getter]
    fn orphans(&self) -> u64 {
        self.mirror.orphans()
    }

    #[getter]
    fn removed_unknown(&self) -> u64 {
        self.mirror.totals().removed_unknown
    }

    fn removed(&mut self, lane: Int<u32>, hashes: &[u8], width: Int<u32>) -> PyResult<Vec<Delta>> {
        Ok(deltas(self.mirror.removed(
            lane.0,
            hashes,
            width.0 as usize,
        )?))
    }

    fn cleared(&mut self, lanes: Vec<Int<u32>>) -> PyResult<Vec<Delta>> {
        Ok(deltas(self.mirror.cleared(&numbers(lanes))?))
    }

    fn suspect(&mut self, lanes: Vec<Int<u32>>) -> PyResult<Vec<Delta>> {
        Ok(deltas(self.mirror.suspect(&numbers(lanes))?))
    }

    fn reset(&mut self) {
        self.mirror.reset();
    }

    fn expire(&mut self, now: f64) -> u64 {
        self.mirror.expire(now)
    }

    fn begin_snapshot(&mut self) -> u64 {
        self.mirror.begin_snapshot()
    }

    fn next_snapshot(&mut self, snapshot: Int<u64>, max_hashes: Int<u32>) -> PyResult<Vec<Delta>> {
        Ok(deltas(
            self.mirror
                .next_snapshot(snapshot.0, max_hashes.0 as usize)?,
        ))
    }

    fn end_snapshot(&mut self, snapshot: Int<u64>) {
        self.mirror.end_snapshot(snapshot.0);
    }

    fn holdings<'py>(
        &self,
        py: Python<'py>,
        lane: Int<u32>,
        confidence: Int<u8>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(pack(py, &self.mirror.holdings(lane.0, confidence.0)?))
    }

    fn counts(&self) -> BTreeMap<&'static str, u64> {
        let (sizes, totals) = (self.mirror.sizes(), self.mirror.totals());
        BTreeMap::from([
            ("units_held", sizes.units_held),
            ("units_placed", sizes.units_placed),
            ("orphans", sizes.orphans),
            ("opaque_units", sizes.opaque_units),
            ("ambiguous_copies", sizes.ambiguous_copies),
            ("memory_bytes", sizes.memory_bytes),
            ("removed_unknown", totals.removed_unknown),
            ("orphans_expired", totals.orphans_expired),
            ("orphans_dropped", totals.orphans_dropped),
            ("places_evicted", totals.places_evicted),
            ("clears", totals.clears),
        ])
    }
}

/// How to read a replica's holdings.
#[pyclass(frozen, module = "servingfleet_core._native")]
struct Profile {
    profile: crate::resume::Profile,
}

type PyLane = (
    Int<u32>,
    Int<u32>,
    Int<u32>,
    Int<u32>,
    Int<u32>,
    Int<u32>,
    bool,
);

fn tier_of(tier: u32) -> Result<usize, String> {
    match tier {
        1..=4 => Ok(tier as usize - 1),
        _ => Err(format!(
            "tier {tier}; known: 1 (gpu), 2 (host), 3 (disk), 4 (shared)"
        )),
    }
}

fn lane_of(lane: PyLane) -> Result<Lane, String> {
    let (
        Int(number),
        Int(tier),
        Int(class),
        Int(group),
        Int(window),
        Int(unit),
        upper_in_predicted,
    ) = lane;
    if number >= 64 {
        return Err(format!("lane {number}; the largest is 63"));
    }
    if unit == 0 {
        return Err(format!("lane {number}: a unit of no tokens"));
    }
    let class = match class {
        1 => Class::Attention,
        2 => Class::Window(window),
        3 => Class::Recurrent,
        _ => {
            return Err(format!(
                "state class {class}; known: 1 (attention), 2 (window), 3 (recurrent)"
            ));
        }
    };
    let tier = tier_of(tier)?;
    Ok(Lane {
        number: number as u8,
        tier,
        class,
        group,
        unit,
        upper_in_predicted,
        store: String::new(),
    })
}

#[pymethods]
impl Profile {
    #[new]
    #[pyo3(signature = (lanes, tiers, *, stores=BTreeMap::new()), text_signature = "(lanes, tiers, *, stores={})")]
    fn new(
        lanes: Vec<PyLane>,
        tiers: Vec<(Int<u32>, bool, Int<u32>, bool)>,
        stores: BTreeMap<u32, String>,
    ) -> PyResult<Self> {
        let lanes: Result<Vec<Lane>, String> = lanes.into_iter().map(lane_of).collect();
        let mut lanes = lanes.map_err(PyValueError::new_err)?;
        for (number, store) in stores {
            let lane = lanes
                .iter_mut()
                .find(|lane| u32::from(lane.number) == number);
            match lane {
                Some(lane) => lane.store = store,
                None => {
                    let text = format!("store of lane {number}, which is not declared");
                    return Err(PyValueError::new_err(text));
                }
            }
        }
        lanes.sort_by_key(|lane| lane.number);
        for pair in lanes.windows(2) {
            if pair[0].number == pair[1].number {
                return Err(PyValueError::new_err(format!(
                    "lane {} is declared twice",
                    pair[0].number
                )));
            }
        }
        for lane in &lanes {
            if let Some(other) = lanes
                .iter()
                .find(|other| other.group == lane.group && other.class != lane.class)
            {
                let (a, b) = (lane.number, other.number);
                let text = format!(
                    "lanes {a} and {b} are of one group, and of different classes or windows"
                );
                return Err(PyValueError::new_err(text));
            }
        }
        let mut rules = [None; TIERS];
        for (Int(tier), whole_prompt, Int(less_units), extends) in tiers {
            let rule = &mut rules[tier_of(tier).map_err(PyValueError::new_err)?];
            if rule.is_some() {
                return Err(PyValueError::new_err(format!("two rules for tier {tier}")));
            }
            *rule = Some(Rule {
                whole_prompt,
                less_units,
                extends,
            });
        }
        let rules = rules.map(Option::unwrap_or_default);
        Ok(Profile {
            profile: crate::resume::Profile { lanes, rules },
        })
    }
}

/// What one rank is expected to reuse of a prompt, in tokens.
#[pyclass(frozen, get_all, module = "servingfleet_core._native")]
struct Match {
    replica: u32,
    rank: u32,
    lower: u64,
    predicted: u64,
    upper: u64,
    tiers: (u64, u64, u64, u64),
    credited: u64,
    tail_tier: u8,
    idle_s: Option<f64>,
    turnover_s: Option<f64>,
}

#[pymethods]
impl Match {
    fn __repr__(&self) -> String {
        let Match {
            replica,
            rank,
            lower,
            predicted,
            upper,
            ..
        } = self;
        format!(
            "<Match replica={replica} rank={rank} lower={lower} predicted={predicted} upper={upper}>"
        )
    }
}

/// Which replica and rank holds which canonical block, in which lane, for one model.
#[pyclass(module = "servingfleet_core._native")]
struct Index {
    index: index::Index,
}

#[pymethods]
impl Index {
    #[new]
    #[pyo3(signature = (block_tokens, *, max_entries=Int(100_000_000)), text_signature = "(block_tokens, *, max_entries=100000000)")]
    fn new(block_tokens: Int<u32>, max_entries: Int<u64>) -> PyResult<Self> {
        check_block(block_tokens.0)?;
        Ok(Index {
            index: index::Index::new(block_tokens.0, max_entries.0),
        })
    }

    fn add_replica(&mut self, profile: &Profile) -> PyResult<u32> {
        Ok(self.index.add_replica(&profile.profile)?)
    }

    fn set_profile(&mut self, replica: Int<u32>, profile: &Profile) -> PyResult<()> {
        Ok(self.index.set_profile(replica.0, &profile.profile)?)
    }

    fn remove_replica(&mut self, replica: Int<u32>) -> PyResult<()> {
        Ok(self.index.remove_replica(replica.0)?)
    }

    #[pyo3(signature = (replica, rank, *, trusted, complete))]
    fn set_rank(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
        trusted: bool,
        complete: bool,
    ) -> PyResult<()> {
        Ok(self.index.set_rank(replica.0, rank.0, trusted, complete)?)
    }

    #[pyo3(signature = (replica, rank, lane, confidence, parent, hashes, now=None))]
    #[allow(clippy::too_many_arguments)] // the contract's own
    fn hold(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
        lane: Int<u32>,
        confidence: Int<u8>,
        parent: Int<u64>,
        hashes: &[u8],
        now: Option<f64>,
    ) -> PyResult<u64> {
        let hashes = unpack(hashes)?;
        self.index.set_time(now);
        Ok(self
            .index
            .hold(replica.0, rank.0, lane.0, confidence.0, parent.0, &hashes)?)
    }

    #[pyo3(signature = (replica, rank, lane, hashes, now=None))]
    fn drop(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
        lane: Int<u32>,
        hashes: &[u8],
        now: Option<f64>,
    ) -> PyResult<u64> {
        let hashes = unpack(hashes)?;
        self.index.set_time(now);
        Ok(self.index.drop(replica.0, rank.0, lane.0, &hashes)?)
    }

    fn touch(&mut self, replica: Int<u32>, rank: Int<u32>, hashes: &[u8], at: f64) -> PyResult<()> {
        let hashes = unpack(hashes)?;
        self.index.set_time(Some(at));
        Ok(self.index.touch(replica.0, rank.0, &hashes)?)
    }

    fn idle(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
        hashes: &[u8],
        now: f64,
    ) -> PyResult<Vec<(u64, Option<f64>)>> {
        let hashes = unpack(hashes)?;
        self.index.set_time(Some(now));
        Ok(self.index.idle(replica.0, rank.0, &hashes)?)
    }

    fn turnover(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
    ) -> PyResult<Vec<(u8, u64, Option<f64>)>> {
        Ok(self.index.turnover(replica.0, rank.0)?)
    }

    #[pyo3(signature = (replica, rank, lane=None))]
    fn clear(
        &mut self,
        replica: Int<u32>,
        rank: Int<u32>,
        lane: Option<Int<u32>>,
    ) -> PyResult<u64> {
        Ok(self
            .index
            .clear(replica.0, rank.0, lane.map(|lane| lane.0))?)
    }

    #[pyo3(signature = (decision, replica, rank, hashes, prompt_tokens, at=None))]
    fn open_credit(
        &mut self,
        decision: &str,
        replica: Int<u32>,
        rank: Int<u32>,
        hashes: &[u8],
        prompt_tokens: Int<u64>,
        at: Option<f64>,
    ) -> PyResult<bool> {
        let hashes = unpack(hashes)?;
        self.index.set_time(at);
        Ok(self
            .index
            .open_credit(decision, replica.0, rank.0, hashes, prompt_tokens.0)?)
    }

    fn close_credit(&mut self, decision: &str) -> bool {
        self.index.close_credit(decision)
    }

    fn close_credits(&mut self, replica: Int<u32>, rank: Int<u32>) -> PyResult<usize> {
        Ok(self.index.close_credits(replica.0, rank.0)?)
    }

    #[pyo3(name = "match", signature = (hashes, prompt_tokens, *, no_reuse=false, now=None))]
    fn find(
        &mut self,
        hashes: &[u8],
        prompt_tokens: Int<u64>,
        no_reuse: bool,
        now: Option<f64>,
    ) -> PyResult<Vec<Match>> {
        self.index.set_time(now);
        let found = self
            .index
            .find(&unpack(hashes)?, prompt_tokens.0, no_reuse)?;
        let answers = found.into_iter().map(|found| Match {
            tail_tier: found.tail.tier,
            idle_s: self.index.since(found.tail.used),
            turnover_s: self.index.turnover_of(&found),
            replica: found.replica,
            rank: found.rank,
            lower: found.lower,
            predicted: found.predicted,
            upper: found.upper,
            tiers: found.tiers.into(),
            credited: found.credited,
        });
        Ok(answers.collect())
    }

    fn held(&self, replica: Int<u32>, rank: Int<u32>) -> PyResult<Vec<(u8, u64)>> {
        Ok(self.index.held(replica.0, rank.0)?)
    }

    fn holdings<'py>(
        &self,
        py: Python<'py>,
        replica: Int<u32>,
        rank: Int<u32>,
        lane: Int<u32>,
        confidence: Int<u8>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        Ok(pack(
            py,
            &self
                .index
                .holdings(replica.0, rank.0, lane.0, confidence.0)?,
        ))
    }

    fn credits(&self, replica: Int<u32>, rank: Int<u32>) -> PyResult<u32> {
        Ok(self.index.credits(replica.0, rank.0)?)
    }

    fn counts(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.index.counts();
        BTreeMap::from([
            ("entries", counts.entries),
            ("blocks", counts.blocks as u64),
            ("runs", counts.runs as u64),
            ("credits", counts.credits as u64),
            ("memory_bytes", counts.memory_bytes as u64),
            ("evicted", counts.evicted),
        ])
    }
}

/// The Rust core: canonical hashing, the mirror of one rank, the prefix index.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{Delta, Index, Match, Mirror, Profile, Rejected, block_hashes, namespace_root};

    #[pymodule_export]
    const HASH_VERSION: &str = crate::hash::VERSION;
}
