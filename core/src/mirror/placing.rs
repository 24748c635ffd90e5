//! Stores: checks an event as a whole, finds the place of each of its blocks, then applies it.

use std::collections::HashSet;

use super::nodes::Delta;
use super::units::{Copies, Key, Level, List, NONE, Place, Spot, Tail, Unit, Waiting};
use super::{Mirror, Refusal, Stored, check_width};
use crate::hash::{self, Media};

/// Where a unit's successor starts.
#[derive(Clone)]
struct Start {
    unit: u32,
    chain: u64,
    depth: u32,
    tail: Tail,
}

/// The place of one unit, computed.
struct Target {
    chain: u64,
    depth: u32,
    offset: u32,
    tail: Option<Box<Tail>>,
    /// Hashes of the blocks that end in the unit, the first with `before` as its parent.
    hashes: Vec<u64>,
    before: u64,
}

/// What an event says of the places of its blocks.
enum Known {
    /// Nothing: it names blocks.
    Named,
    /// Blocks before `from` wait for the event's parent; the others are computed.
    Placed {
        from: usize,
        start: u32,
        targets: Vec<Target>,
    },
    /// Blocks before `from` wait; the others follow a block whose keys nobody can compute.
    Opaque { from: usize },
    /// All wait.
    Orphaned,
}

enum Origin {
    At(Start),
    Opaque,
    Unknown,
}

impl Mirror {
    /// Blocks stored.
    pub fn stored(&mut self, event: &Stored<'_>) -> Result<Vec<Delta>, Refusal> {
        let (lane, multiset) = self.lane(event.lane)?;
        self.check(event)?;
        let keys: Vec<&[u8]> = event.hashes.chunks_exact(event.width).collect();
        let numbers: Vec<Option<u32>> = keys.iter().map(|key| self.units.find(key)).collect();
        let known = self.locate(event, &keys, &numbers)?;
        self.check_places(event, &keys, &numbers, &known)?;
        self.make_room(event, &numbers)?;

        let named = matches!(known, Known::Named);
        let mut targets = Vec::new();
        let (from, mut previous) = match known {
            Known::Placed {
                from,
                start,
                targets: computed,
            } => {
                targets = computed;
                (from, start)
            }
            Known::Opaque { from } => (from, NONE),
            Known::Named | Known::Orphaned => (keys.len(), NONE),
        };
        let placed = !targets.is_empty();
        let repeat = self.repeats(event, lane, &numbers);
        let mut targets = targets.into_iter();
        let mut fresh = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            if event.places_only && numbers[at].is_none() {
                targets.next();
                continue;
            }
            let number = numbers[at].unwrap_or_else(|| self.units.add(key));
            let waits = self
                .units
                .get(number)
                .is_some_and(|unit| matches!(unit.place, Place::Waiting(_)));
            let mut span = 0;
            if at >= from && placed {
                if let Some(target) = targets.next() {
                    if waits {
                        self.put(number, previous, event.unit, target);
                        fresh.push(number);
                    } else {
                        span = self.widen(number, event.unit, target);
                    }
                }
            } else if waits && (at >= from || event.opaque) {
                self.make_opaque(number);
                fresh.push(number);
            } else if waits {
                self.wait(number, event, &keys, at, named);
            } else if named && event.masked == 0 {
                span = self.stretch(number, event.unit);
            }
            if !event.places_only {
                self.add_copy(number, lane, multiset, span, repeat, event.doubtful);
            }
            self.settle(number);
            previous = number;
        }
        self.drain(fresh);
        let parent = event.parent.and_then(|parent| self.units.find(parent));
        if let Some(parent) = parent {
            self.settle(parent);
        }
        while self.units.len_of(List::Orphans) > self.settings.max_orphans {
            let Some(oldest) = self.units.first(List::Orphans) else {
                break;
            };
            self.forget(oldest);
            self.totals.orphans_dropped += 1;
        }
        Ok(self.nodes.take_changes())
    }

    fn check(&self, event: &Stored<'_>) -> Result<(), Refusal> {
        check_width(event.hashes, event.width)?;
        let invalid = |text: String| Err(Refusal::Invalid(text));
        if let Some(parent) = event.parent.filter(|parent| parent.len() != event.width) {
            return invalid(format!(
                "a parent of {} bytes, hashes of {}",
                parent.len(),
                event.width
            ));
        }
        if !event.tokens.len().is_multiple_of(4) {
            return invalid(format!(
                "{} bytes of tokens, 4 bytes each",
                event.tokens.len()
            ));
        }
        if event.now.is_nan() {
            return invalid("a time that is no number".to_owned());
        }
        if !event.media.is_sorted_by_key(|(index, _)| index) {
            return invalid("media that do not ascend".to_owned());
        }
        let rejected = |reason, text: String| Err(Refusal::Rejected(reason, text));
        let count = event.hashes.len() / event.width;
        if count == 0 {
            return rejected("no_hashes", "a store that names no block".to_owned());
        }
        if !event.tokens.is_empty() {
            let (unit, block) = (event.unit, self.settings.block_tokens);
            if unit == 0 || (!unit.is_multiple_of(block) && !block.is_multiple_of(unit)) {
                return rejected(
                    "unit_size",
                    format!("a unit of {unit} tokens, canonical blocks of {block}"),
                );
            }
            if event.masked > 0 && !unit.is_multiple_of(block) {
                return rejected(
                    "unit_size",
                    format!("masked units of {unit} tokens, canonical blocks of {block}"),
                );
            }
            let units = count as u64 + u64::from(event.masked);
            let want = units * u64::from(unit) + u64::from(self.settings.pairs);
            let tokens = event.tokens.len() as u64 / 4;
            if tokens != want {
                return rejected(
                    "token_count",
                    format!("{tokens} tokens for {units} units of {unit}, not {want}"),
                );
            }
        } else if event.masked > 0 {
            return invalid(format!("{} masked units without tokens", event.masked));
        }
        let mut seen = HashSet::with_capacity(count);
        for (at, key) in event.hashes.chunks_exact(event.width).enumerate() {
            if event.parent == Some(key) {
                return rejected(
                    "self_parent",
                    format!("block {at} of {count} is its own ancestor"),
                );
            }
            if !seen.insert(key) {
                return rejected(
                    "duplicate_in_event",
                    format!("block {at} of {count} is named twice"),
                );
            }
        }
        Ok(())
    }

    /// What the event says of places, given what is known already.
    fn locate(
        &self,
        event: &Stored<'_>,
        keys: &[&[u8]],
        numbers: &[Option<u32>],
    ) -> Result<Known, Refusal> {
        if event.tokens.is_empty() || (event.untold && numbers.iter().any(Option::is_some)) {
            return Ok(Known::Named);
        }
        if event.opaque {
            return Ok(Known::Opaque { from: 0 });
        }
        let (from, origin) = match event.parent {
            None => {
                let Stored {
                    adapter,
                    cache_salt,
                    ..
                } = event;
                let chain =
                    hash::namespace_root(&self.model, adapter, cache_salt, self.settings.pairs);
                (
                    0,
                    Origin::At(Start {
                        unit: NONE,
                        chain,
                        depth: 0,
                        tail: Tail::default(),
                    }),
                )
            }
            Some(parent) => match self.origin(self.units.find(parent)) {
                // The place of what follows masked blocks rests on the parent's alone.
                Origin::Unknown if event.masked > 0 => return Ok(Known::Named),
                // A block whose place is known anchors those that follow it.
                Origin::Unknown => {
                    let anchors = numbers.iter().enumerate();
                    let mut found = anchors.map(|(at, number)| (at + 1, self.origin(*number)));
                    let found = found.find(|(_, origin)| !matches!(origin, Origin::Unknown));
                    found.unwrap_or((keys.len(), Origin::Unknown))
                }
                origin => (0, origin),
            },
        };
        Ok(match origin {
            Origin::Unknown => Known::Orphaned,
            Origin::Opaque => Known::Opaque { from },
            Origin::At(start) => {
                let start = self.beyond(start, event);
                let skip = (from + event.masked as usize) * event.unit as usize;
                let tokens = &event.tokens[skip * 4..];
                let late = event
                    .media
                    .iter()
                    .filter(|(index, _)| *index as usize >= skip);
                let media = late
                    .map(|(index, key)| (*index - skip as u32, key.clone()))
                    .collect();
                let targets = self.targets(&start, event.unit, keys.len() - from, tokens, media);
                if event.masked > 0 && !self.credible(event, numbers, &targets) {
                    return Ok(Known::Named);
                }
                Known::Placed {
                    from,
                    start: start.unit,
                    targets,
                }
            }
        })
    }

    /// Where masked blocks lie is the caller's inference: it must not contradict what is known, and no other engine hash
    /// may stand at one of these places.
    fn credible(&self, event: &Stored<'_>, numbers: &[Option<u32>], targets: &[Target]) -> bool {
        numbers.iter().zip(targets).all(|(number, target)| {
            let unit = number.and_then(|number| self.units.get(number));
            match unit.map(|unit| &unit.place) {
                Some(Place::At(spot)) => self.same(spot, event.unit, target),
                Some(Place::Opaque) => false,
                Some(Place::Waiting(_)) | None => self.nodes.find(target.chain).is_none(),
            }
        })
    }

    /// Where the first block that has a hash starts.
    fn beyond(&self, start: Start, event: &Stored<'_>) -> Start {
        let masked = event.masked as usize;
        let targets = match masked {
            0 => Vec::new(),
            _ => self.targets(
                &start,
                event.unit,
                masked,
                event.tokens,
                event.media.to_vec(),
            ),
        };
        match targets.into_iter().next_back() {
            Some(last) => Start {
                unit: NONE,
                chain: last.chain,
                depth: last.depth,
                tail: last.tail.map_or_else(Tail::default, |tail| *tail),
            },
            None => start,
        }
    }

    fn origin(&self, number: Option<u32>) -> Origin {
        let unit = number.and_then(|number| Some((number, self.units.get(number)?)));
        match unit.map(|(number, unit)| (number, &unit.place)) {
            Some((unit, Place::At(spot))) => Origin::At(Start {
                unit,
                chain: spot.chain,
                depth: spot.depth,
                tail: spot.tail.as_deref().cloned().unwrap_or_default(),
            }),
            Some((_, Place::Opaque)) => Origin::Opaque,
            Some((_, Place::Waiting(_))) | None => Origin::Unknown,
        }
    }

    /// Places of `count` units of `unit` tokens that follow `start`.
    fn targets(
        &self,
        start: &Start,
        unit: u32,
        count: usize,
        tokens: &[u8],
        media: Vec<Media>,
    ) -> Vec<Target> {
        let block = self.settings.block_tokens as usize;
        let unit = unit as usize;
        let ahead = start.tail.tokens.len() / 4;
        let joined;
        let tokens = if ahead == 0 {
            tokens
        } else {
            joined = [&start.tail.tokens, tokens].concat();
            &joined
        };
        let mut items = start.tail.media.clone();
        items.extend(
            media
                .into_iter()
                .map(|(index, key)| (index.saturating_add(ahead as u32), key)),
        );
        let hashes = hash::chain(start.chain, tokens, block, &items, self.settings.pairs);
        let hash_before = |at: usize| if at == 0 { start.chain } else { hashes[at - 1] };
        let place = |at: usize| {
            let begin = ahead + at * unit;
            let end = begin + unit;
            let (first, last) = (begin / block, end / block);
            let boundary = last * block;
            let tail = (boundary < end).then(|| {
                let inside = items
                    .iter()
                    .filter(|(at, _)| (boundary..end).contains(&(*at as usize)));
                Box::new(Tail {
                    tokens: tokens[boundary * 4..end * 4].to_vec(),
                    media: inside
                        .map(|(at, key)| (*at - boundary as u32, key.clone()))
                        .collect(),
                })
            });
            Target {
                chain: hash_before(last),
                depth: start.depth.saturating_add(last as u32),
                offset: (begin % block) as u32,
                tail,
                hashes: hashes[first..last].to_vec(),
                before: hash_before(first),
            }
        };
        (0..count).map(place).collect()
    }

    /// What is known already must agree with what the event says.
    fn check_places(
        &self,
        event: &Stored<'_>,
        keys: &[&[u8]],
        numbers: &[Option<u32>],
        known: &Known,
    ) -> Result<(), Refusal> {
        for (at, number) in numbers.iter().enumerate() {
            let Some(unit) = number.and_then(|number| self.units.get(number)) else {
                continue;
            };
            let agrees = match (known, &unit.place) {
                (Known::Named, _) => true,
                (Known::Placed { from, targets, .. }, place) if at >= *from => match place {
                    Place::At(spot) => self.same(spot, event.unit, &targets[at - from]),
                    Place::Opaque => false,
                    Place::Waiting(_) => true,
                },
                (Known::Opaque { from }, place) if at >= *from => !matches!(place, Place::At(_)),
                (_, Place::Waiting(Some(waiting))) if event.masked == 0 => {
                    **waiting == self.waiting_for(event, keys, at)
                }
                (_, _) => true,
            };
            if !agrees {
                let text = format!(
                    "block {at} of {} was stored before at another place",
                    keys.len()
                );
                return Err(Refusal::Rejected("hash_conflict", text));
            }
        }
        Ok(())
    }

    fn same(&self, spot: &Spot, unit: u32, target: &Target) -> bool {
        let block = self.settings.block_tokens;
        let whole = |offset: u32, tokens: u32| offset == 0 && tokens.is_multiple_of(block);
        spot.chain == target.chain
            && spot.depth == target.depth
            && spot.tail == target.tail
            // One hash may name the same boundary in layer groups of different units.
            && (spot.tokens == unit || (whole(spot.offset, spot.tokens) && whole(target.offset, unit)))
    }

    fn waiting_for(&self, event: &Stored<'_>, keys: &[&[u8]], at: usize) -> Waiting {
        let unit = event.unit as usize;
        let (begin, end) = (at * unit, (at + 1) * unit);
        let parent = if at == 0 {
            event.parent.unwrap_or_default()
        } else {
            keys[at - 1]
        };
        let inside = event
            .media
            .iter()
            .filter(|(index, _)| (begin..end).contains(&(*index as usize)));
        Waiting {
            parent: Key::new(parent),
            unit: event.unit,
            tokens: event.tokens[begin * 4..(end + usize::from(self.settings.pairs)) * 4].into(),
            media: inside
                .map(|(index, key)| (*index - begin as u32, key.clone()))
                .collect(),
        }
    }

    /// Room for the blocks that are new, or the event is rejected.
    fn make_room(&mut self, event: &Stored<'_>, numbers: &[Option<u32>]) -> Result<(), Refusal> {
        let new = numbers.iter().filter(|number| number.is_none()).count();
        let parent = event.parent.and_then(|parent| self.units.find(parent));
        let touched: Vec<u32> = numbers.iter().flatten().copied().chain(parent).collect();
        let needed: HashSet<u32> = touched
            .into_iter()
            .filter(|&number| self.units.list(number) == List::Idle)
            .collect();
        let idle = self.units.len_of(List::Idle) - needed.len();
        let over = (self.units.count() + new).saturating_sub(self.settings.max_units);
        if over > idle {
            let text = format!(
                "{} units known, {new} new, at most {}; {idle} could make room",
                self.units.count(),
                self.settings.max_units
            );
            return Err(Refusal::Rejected("mirror_full", text));
        }
        for &number in &needed {
            self.units.enlist(number, List::No);
        }
        for _ in 0..over {
            if let Some(oldest) = self.units.first(List::Idle) {
                self.forget(oldest);
                self.totals.places_evicted += 1;
            }
        }
        Ok(())
    }

    /// Places a unit that waited or is new, and tells of the copies it has.
    fn put(&mut self, number: u32, parent: u32, tokens: u32, target: Target) {
        self.unwait(number);
        let first = target.depth - target.hashes.len() as u32;
        let mut before = target.before;
        let mut nodes = Vec::with_capacity(target.hashes.len());
        for (at, &hash) in target.hashes.iter().enumerate() {
            nodes.push(self.nodes.acquire(hash, before, first + at as u32));
            before = hash;
        }
        let spot = Spot {
            chain: target.chain,
            depth: target.depth,
            tokens,
            offset: target.offset,
            parent: if target.offset > 0 { parent } else { NONE },
            children: Vec::new(),
            span: nodes.len() as u32,
            nodes: nodes.into_boxed_slice(),
            tail: target.tail,
        };
        if target.offset > 0 {
            if let Some(Place::At(parent)) = self.units.get_mut(parent).map(|unit| &mut unit.place)
            {
                parent.children.push(number);
            }
            self.settle(parent);
        }
        let Some(unit) = self.units.get_mut(number) else {
            return;
        };
        unit.place = Place::At(spot);
        for copies in unit.held.clone() {
            self.shift(
                number,
                copies.lane,
                copies.span,
                Level::None,
                copies.level(),
            );
        }
    }

    /// A placed unit, stored as one of `tokens` tokens: returns the span of its copies, 0 for its own.
    fn widen(&mut self, number: u32, tokens: u32, target: Target) -> u32 {
        let Some(Place::At(spot)) = self.units.get_mut(number).map(|unit| &mut unit.place) else {
            return 0;
        };
        if spot.tokens == tokens {
            return 0;
        }
        let (have, want) = (spot.nodes.len(), target.hashes.len());
        if want > have {
            let first = target.depth - want as u32;
            let mut nodes = Vec::with_capacity(want);
            let mut before = target.before;
            for (at, &hash) in target.hashes[..want - have].iter().enumerate() {
                nodes.push(self.nodes.acquire(hash, before, first + at as u32));
                before = hash;
            }
            nodes.extend_from_slice(&spot.nodes);
            spot.nodes = nodes.into_boxed_slice();
        }
        want as u32
    }

    /// A placed unit, named as the end of one of `tokens` tokens: returns the span of its copies, 0 for its own.
    fn stretch(&mut self, number: u32, tokens: u32) -> u32 {
        let block = self.settings.block_tokens;
        let Some(spot) = self.units.get(number).and_then(Unit::spot) else {
            return 0;
        };
        let whole = spot.offset == 0 && spot.tail.is_none() && tokens.is_multiple_of(block);
        let ends =
            tokens > 0 && (u64::from(spot.depth) * u64::from(block)).is_multiple_of(tokens.into());
        let want = (tokens / block) as usize;
        if !whole || !ends || want <= spot.span as usize {
            return 0;
        }
        let mut before = Vec::new();
        let mut next = spot.nodes.first().copied();
        while spot.nodes.len() + before.len() < want {
            let parent = next
                .and_then(|node| self.nodes.get(node))
                .map(|node| node.parent);
            let Some(parent) = parent.and_then(|hash| self.nodes.at(hash)) else {
                return 0; // its place was forgotten
            };
            before.push(parent);
            next = Some(parent);
        }
        let nodes: Vec<u32> = before.iter().rev().chain(&spot.nodes).copied().collect();
        for &node in &before {
            self.nodes.keep(node);
        }
        if let Some(Place::At(spot)) = self.units.get_mut(number).map(|unit| &mut unit.place) {
            spot.nodes = nodes.into_boxed_slice();
        }
        want as u32
    }

    fn make_opaque(&mut self, number: u32) {
        self.unwait(number);
        if let Some(unit) = self.units.get_mut(number) {
            unit.place = Place::Opaque;
        }
    }

    /// Makes a unit an orphan, or renews its turn.
    fn wait(&mut self, number: u32, event: &Stored<'_>, keys: &[&[u8]], at: usize, named: bool) {
        let Some(unit) = self.units.get_mut(number) else {
            return;
        };
        unit.since = event.now;
        let unknown = matches!(unit.place, Place::Waiting(None));
        if unknown && !named {
            let waiting = self.waiting_for(event, keys, at);
            self.waiting
                .entry(waiting.parent.bytes().to_vec())
                .or_default()
                .push(number);
            if let Some(unit) = self.units.get_mut(number) {
                unit.place = Place::Waiting(Some(Box::new(waiting)));
            }
        }
        self.units.enlist(number, List::Orphans);
    }

    fn unwait(&mut self, number: u32) {
        let Some(Place::Waiting(waiting)) = self.units.get_mut(number).map(|unit| &mut unit.place)
        else {
            return;
        };
        let Some(waiting) = waiting.take() else {
            return;
        };
        if let Some(children) = self.waiting.get_mut(waiting.parent.bytes()) {
            children.retain(|&child| child != number);
            if children.is_empty() {
                self.waiting.remove(waiting.parent.bytes());
            }
        }
    }

    /// From the root, of blocks that are held: a report of a hit looks like this too. It names nothing else, so where
    /// all is known that is held, a new block among them proves that all were computed again.
    fn repeats(&self, event: &Stored<'_>, lane: u8, numbers: &[Option<u32>]) -> bool {
        let held = |number: &Option<u32>| {
            let unit = number.and_then(|number| self.units.get(number));
            unit.is_some_and(|unit| unit.level(lane) != Level::None)
        };
        let rooted = event.parent.is_none() && !event.tokens.is_empty();
        rooted && !event.computed && (!event.whole || numbers.iter().all(held))
    }

    fn add_copy(
        &mut self,
        number: u32,
        lane: u8,
        multiset: bool,
        span: u32,
        repeat: bool,
        doubtful: bool,
    ) {
        let known = self
            .units
            .get(number)
            .and_then(|unit| unit.copies(lane).copied());
        let mut copies = known.unwrap_or(Copies {
            lane,
            span,
            confirmed: 0,
            upper: 0,
        });
        // The one copy that is certain either way is counted already.
        let ambiguous = repeat && copies.confirmed > 0;
        match (multiset, ambiguous || doubtful) {
            (true, true) => copies.upper = copies.upper.saturating_add(1),
            (true, false) => copies.confirmed = copies.confirmed.saturating_add(1),
            (false, _) if doubtful => (copies.confirmed, copies.upper) = (0, 1),
            (false, _) => (copies.confirmed, copies.upper) = (1, 0),
        }
        self.set_copies(number, copies);
    }

    /// Places what waited for these units, and what waited for those.
    fn drain(&mut self, mut placed: Vec<u32>) {
        placed.reverse();
        while let Some(number) = placed.pop() {
            let Some(unit) = self.units.get(number) else {
                continue;
            };
            let Some(children) = self.waiting.remove(unit.key.bytes()) else {
                continue;
            };
            for &child in children.iter().rev() {
                let place = self
                    .units
                    .get_mut(child)
                    .map(|unit: &mut Unit| &mut unit.place);
                let Some(Place::Waiting(waiting)) = place else {
                    continue;
                };
                let Some(waiting) = waiting.take() else {
                    continue;
                };
                match self.origin(Some(number)) {
                    Origin::At(start) => {
                        let media = waiting.media.into_vec();
                        let mut targets =
                            self.targets(&start, waiting.unit, 1, &waiting.tokens, media);
                        if let Some(target) = targets.pop() {
                            self.put(child, number, waiting.unit, target);
                        }
                    }
                    Origin::Opaque => self.make_opaque(child),
                    Origin::Unknown => {}
                }
                self.settle(child);
                placed.push(child);
            }
        }
    }
}
