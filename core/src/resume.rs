//! How much of a prompt can be resumed, given which blocks are held: one function, three views. Pure.
//!
//! The walk goes tier by tier, fastest first, and never back. In each tier it looks for the largest boundary that all
//! layer groups accept, beyond what faster tiers gave, at most what an engine reports for that tier.

use std::ops::Range;

use crate::bits::{self, Blocks};

/// Number of tiers: gpu, host, disk, shared.
pub const TIERS: usize = 4;

/// What a layer group must find to resume at a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Every block from the start.
    Attention,
    /// The blocks that cover the last `window - 1` tokens.
    Window(u32),
    /// The unit that ends there.
    Recurrent,
}

/// A tier times a state class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Number in deltas, below 64.
    pub number: u8,
    /// 0 is the fastest.
    pub tier: usize,
    /// What its layer group must find.
    pub class: Class,
    /// Lanes of one group on several tiers extend one another.
    pub group: u32,
    /// Tokens; a multiple or a divisor of the block.
    pub unit: u32,
    /// UPPER blocks count in `predicted`.
    pub upper_in_predicted: bool,
    /// The store that this lane shows: what anybody told of it can be loaded from here. Empty: memory of one's own.
    pub store: String,
}

/// What a hit in a tier may report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// At most the whole prompt; else all but its last token.
    pub whole_prompt: bool,
    /// Units taken off the claim after the cap.
    pub less_units: u32,
    /// The walk may go on here where faster tiers end.
    pub extends: bool,
}

impl Default for Rule {
    fn default() -> Self {
        Rule {
            whole_prompt: false,
            less_units: 0,
            extends: true,
        }
    }
}

/// How to read a replica's holdings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// In the order of their numbers.
    pub lanes: Vec<Lane>,
    /// By tier.
    pub rules: [Rule; TIERS],
}

struct Group {
    class: Class,
    unit: u64,
    /// Positions in `Plan::lanes`.
    lanes: Vec<usize>,
}

struct Stage {
    tier: usize,
    rule: Rule,
    /// Claims end at its multiples: the least common multiple of the units.
    step: u64,
    groups: Vec<Group>,
    /// Every group of the profile has a lane here: else they can't agree.
    complete: bool,
}

/// A profile, prepared for blocks of one size.
pub struct Plan {
    block: u64,
    /// The profile's, or one GPU attention lane where it has none, so that credits count.
    pub lanes: Vec<Lane>,
    stages: Vec<Stage>,
    /// A block that nobody holds doesn't always end the walk.
    pub passes_gaps: bool,
    /// Some lane has units smaller than a block, of which only whole blocks are known.
    small: bool,
    /// Who holds nothing can resume nothing.
    pub needs_blocks: bool,
    /// One lane, of attention, with units of whole blocks.
    pub plain: bool,
    /// The profile has no lane.
    undeclared: bool,
    /// Some tier, in use or not, may report a whole prompt.
    whole: bool,
    /// Some tier without a lane may.
    unseen_whole: bool,
}

/// Tokens by tier, in the three views.
#[derive(Clone, Copy, Debug, Default)]
pub struct Views {
    /// By confirmed blocks alone.
    pub lower: [u64; TIERS],
    /// What is expected.
    pub predicted: [u64; TIERS],
    /// What is possible.
    pub upper: [u64; TIERS],
}

/// Which blocks of a prompt one rank holds.
#[derive(Clone, Copy, Default)]
pub struct Held<'a> {
    /// Confirmed by events.
    pub confirmed: Blocks<'a>,
    /// Perhaps.
    pub upper: Blocks<'a>,
}

/// Which blocks are credited, in GPU lanes. Bit i is block i; a short slice ends in zeros.
#[derive(Clone, Copy, Default)]
pub struct Credited<'a> {
    /// In attention lanes.
    pub attention: &'a [u64],
    /// In window and recurrent lanes: the state at the last boundary where a next request can resume.
    pub state: &'a [u64],
    /// There, too: what may be kept before it, where prompts part.
    pub possible: &'a [u64],
}

/// What counts as held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// Confirmed blocks.
    Lower,
    /// And credits, and UPPER blocks of the lanes that say so.
    Predicted,
    /// And everything possible.
    Upper,
}

/// A prompt and what one rank holds of it.
pub struct Question<'a> {
    /// How to read it.
    pub plan: &'a Plan,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Blocks of the prompt whose hashes are known.
    pub blocks: u64,
    /// By position in `plan.lanes`.
    pub held: &'a [Held<'a>],
    /// Credits.
    pub credited: Credited<'a>,
}

fn common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

fn floor(value: u64, step: u64) -> u64 {
    match value {
        0 => 0, // the usual start of a walk, and a division is slow
        _ => value - value % step,
    }
}

impl Stage {
    /// What a hit in this tier can cover at most, before `less_units`.
    fn cap(&self, prompt: u64) -> u64 {
        floor(
            prompt.saturating_sub(u64::from(!self.rule.whole_prompt)),
            self.step,
        )
    }

    fn less(&self) -> u64 {
        self.step.saturating_mul(u64::from(self.rule.less_units))
    }
}

impl Plan {
    /// Prepares a profile, or says which unit doesn't fit the block.
    pub fn new(profile: &Profile, block_tokens: u32) -> Result<Plan, String> {
        let block = u64::from(block_tokens);
        let mut lanes = profile.lanes.clone();
        let undeclared = lanes.is_empty();
        for lane in &lanes {
            if !lane.unit.is_multiple_of(block_tokens) && !block_tokens.is_multiple_of(lane.unit) {
                return Err(format!(
                    "lane {}: unit of {} tokens is neither a multiple nor a divisor of the block, {block_tokens} tokens",
                    lane.number, lane.unit
                ));
            }
        }
        if lanes.is_empty() {
            lanes.push(Lane {
                number: u8::MAX,
                tier: 0,
                class: Class::Attention,
                group: 0,
                unit: block_tokens,
                upper_in_predicted: false,
                store: String::new(),
            });
        }
        let mut names: Vec<u32> = lanes.iter().map(|lane| lane.group).collect();
        names.sort_unstable();
        names.dedup();
        let mut stages = Vec::new();
        for tier in 0..TIERS {
            let mut groups = Vec::new();
            for name in &names {
                let members: Vec<usize> = (0..lanes.len())
                    .filter(|&at| lanes[at].tier == tier && lanes[at].group == *name)
                    .collect();
                if let Some(&first) = members.first() {
                    let unit = members.iter().fold(1, |unit, &at| {
                        common_multiple(unit, u64::from(lanes[at].unit))
                    });
                    groups.push(Group {
                        class: lanes[first].class,
                        unit,
                        lanes: members,
                    });
                }
            }
            let rule = profile.rules[tier];
            if !groups.is_empty() && (stages.is_empty() || rule.extends) {
                let step = groups
                    .iter()
                    .fold(1, |step, group| common_multiple(step, group.unit));
                let complete = groups.len() == names.len();
                stages.push(Stage {
                    tier,
                    rule,
                    step,
                    groups,
                    complete,
                });
            }
        }
        let whole = |tier: usize| profile.rules[tier].whole_prompt;
        let seen = |tier: usize| lanes.iter().any(|lane| lane.tier == tier);
        let unseen_whole = (0..TIERS).any(|tier| whole(tier) && !seen(tier));
        let attention = lanes.iter().any(|lane| lane.class == Class::Attention);
        let small = lanes.iter().any(|lane| u64::from(lane.unit) < block);
        let ragged = stages.iter().filter(|stage| stage.step < block).count();
        Ok(Plan {
            block,
            passes_gaps: !attention || ragged > 1,
            small,
            needs_blocks: attention && !small,
            plain: attention && !small && lanes.len() == 1 && lanes[0].store.is_empty(),
            undeclared,
            whole: (0..TIERS).any(whole),
            unseen_whole,
            lanes,
            stages,
        })
    }

    /// Blocks of a prompt whose window and recurrent state its prefill leaves on the GPU: an engine keeps it only where
    /// a next request can resume, at the last boundary before the last token.
    pub fn kept_state(&self, prompt: u64) -> Range<usize> {
        let before_last = prompt.saturating_sub(1);
        let kept = self.lanes.iter().filter(|lane| lane.tier == 0);
        let kept = kept.filter_map(|lane| {
            let unit = u64::from(lane.unit);
            let units = match lane.class {
                Class::Attention => return None,
                Class::Window(window) => u64::from(window).saturating_sub(1).div_ceil(unit),
                Class::Recurrent => 1,
            };
            let end = floor(before_last, unit);
            let begin = end.saturating_sub(units.saturating_mul(unit));
            Some((begin / self.block, end / self.block))
        });
        let all = kept.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        let (begin, end) = all.unwrap_or((0, before_last / self.block));
        begin as usize..end as usize
    }

    /// The most that an engine could report for a prompt, in tokens. Of one that is not trusted no unit counts: what was
    /// learned of it may be wrong.
    pub fn most(&self, prompt: u64, trusted: bool) -> u64 {
        let most = self
            .stages
            .iter()
            .map(|stage| stage.cap(prompt).saturating_sub(stage.less()))
            .max()
            .unwrap_or(0);
        match trusted && !self.undeclared {
            true => most.max(if self.unseen_whole { prompt } else { 0 }),
            false => prompt.saturating_sub(u64::from(!self.whole)),
        }
    }
}

impl Question<'_> {
    /// The three views, each worked out only where it can differ from the one before.
    pub fn views(&self) -> Views {
        let credited = !self.credited.attention.is_empty() || !self.credited.possible.is_empty();
        let doubted = self.held.iter().any(|held| !held.upper.is_empty());
        let confirmed = self.held.iter().any(|held| !held.confirmed.is_empty());
        if self.plan.needs_blocks && !credited && !doubted && !confirmed {
            return Views::default();
        }
        let lower = match self.plan.plain {
            true => self.plain(),
            false => self.resumed(View::Lower),
        };
        let predicted = match credited || doubted {
            true => self.resumed(View::Predicted),
            false => lower,
        };
        let upper = match doubted || self.plan.small || !self.credited.possible.is_empty() {
            true => self.resumed(View::Upper),
            false => predicted,
        };
        // A fast tier that gives more may leave less than a unit to a slower one, and the sum is less then: what is
        // perhaps there counts against what is expected, too.
        let sum = |view: &[u64; TIERS]| view.iter().sum::<u64>();
        let mut ordered = [predicted, lower, upper];
        ordered.sort_by_key(sum);
        Views {
            lower: ordered[0],
            predicted: match sum(&upper) < sum(&predicted) {
                true => upper,
                false => predicted,
            },
            upper: ordered[2],
        }
    }

    /// `resumed(View::Lower)` of a plain plan, which is what most are.
    fn plain(&self) -> [u64; TIERS] {
        let mut by_tier = [0; TIERS];
        for stage in &self.plan.stages {
            let held = self.held.first().copied().unwrap_or_default().confirmed;
            let reach = held.first_missing(self.blocks) * self.plan.block;
            let most = self
                .prompt
                .saturating_sub(u64::from(!stage.rule.whole_prompt));
            by_tier[stage.tier] = floor(reach.min(most), stage.step).saturating_sub(stage.less());
        }
        by_tier
    }

    /// Tokens that can be resumed, by tier; their sum is the claim.
    pub fn resumed(&self, view: View) -> [u64; TIERS] {
        let mut by_tier = [0; TIERS];
        let mut claim = 0;
        let mut ragged = false;
        for stage in self.plan.stages.iter().filter(|stage| stage.complete) {
            let small = stage.step < self.plan.block;
            // Two tiers of small units may share a block that neither holds as a whole.
            let bridged = view == View::Upper && small && ragged;
            let mut reach = self.boundary(stage, view, claim, bridged).max(claim);
            if reach - claim < stage.step {
                reach = claim; // what is loaded is whole units, at least one
            }
            if view == View::Upper && small {
                // Units of the next block may be there: only whole blocks are known.
                let most = reach + (self.plan.block - stage.step);
                reach = reach.max(most.min(stage.cap(self.prompt)));
                ragged = true;
            } else {
                ragged = false;
            }
            let end = reach.saturating_sub(stage.less()).max(claim);
            by_tier[stage.tier] = end - claim;
            claim = end;
        }
        by_tier
    }

    /// The largest boundary beyond `claim` that every group accepts in this tier, or 0.
    fn boundary(&self, stage: &Stage, view: View, claim: u64, bridged: bool) -> u64 {
        let block = self.plan.block;
        // Where the need for blocks of this tier begins.
        let start = |group: &Group| match bridged {
            true => claim.div_ceil(block) * block,
            false => floor(claim, group.unit),
        };
        let mut end = stage.cap(self.prompt).min(self.blocks * block);
        for group in stage
            .groups
            .iter()
            .filter(|group| group.class == Class::Attention)
        {
            let from = start(group) / block;
            let word = |at| self.word(stage, group, view, at);
            let missing = bits::first_zero(from, self.blocks, word);
            end = end.min(missing * block);
        }
        let coarse = stage.step.max(block);
        if stage.step >= block {
            end = floor(end, coarse);
        }
        while end > claim {
            let mut next = end;
            for group in &stage.groups {
                let need = match group.class {
                    Class::Attention => continue,
                    Class::Window(window) => {
                        let units = u64::from(window).saturating_sub(1).div_ceil(group.unit);
                        units
                            .saturating_mul(group.unit)
                            .saturating_add(stage.less())
                    }
                    Class::Recurrent => group.unit,
                };
                if view == View::Upper && group.unit < block {
                    continue; // part of a block may do, and only whole blocks are known
                }
                let mut from = end.saturating_sub(need);
                if group.class != Class::Recurrent {
                    from = from.max(start(group).min(end));
                }
                if from == end {
                    continue; // a window of one token needs nothing
                }
                let blocks = (from / block, end.div_ceil(block));
                let word = |word| self.word(stage, group, view, word);
                if let Some(missing) = bits::last_zero(blocks.0, blocks.1, word) {
                    next = next.min(match group.class {
                        Class::Recurrent => end - 1,
                        _ => (missing * block).min(end - 1),
                    });
                }
            }
            if next == end {
                return end;
            }
            end = floor(next, coarse);
        }
        0
    }

    fn word(&self, stage: &Stage, group: &Group, view: View, word: u64) -> u64 {
        let read = |bits: &[u64]| bits.get(word as usize).copied().unwrap_or(0);
        let mut found = 0;
        for &lane in &group.lanes {
            let held = self.held.get(lane).copied().unwrap_or_default();
            found |= held.confirmed.word(word);
            let upper = match view {
                View::Lower => false,
                View::Predicted => self.plan.lanes[lane].upper_in_predicted,
                View::Upper => true,
            };
            if upper {
                found |= held.upper.word(word);
            }
        }
        if stage.tier == 0 && view != View::Lower {
            found |= read(match group.class {
                Class::Attention => self.credited.attention,
                Class::Window(_) | Class::Recurrent if view == View::Upper => {
                    self.credited.possible
                }
                Class::Window(_) | Class::Recurrent => self.credited.state,
            });
        }
        found
    }
}
