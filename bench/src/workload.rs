//! Prompts, and what engines say of them: the same events for every side.

/// Blocks of an event where nothing else is said: a prefill step of 2,048 tokens.
pub const STEP_BLOCKS: usize = 128;
/// Prompts that share their first quarter, as conversations share a system prompt.
const GROUP: usize = 8;

/// One measurement.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Workers that the index knows.
    pub workers: usize,
    /// Blocks of a prompt.
    pub blocks: usize,
    /// Workers that hold each prompt.
    pub holders: usize,
    /// Blocks in one event.
    pub step: usize,
    /// Pairs of worker and block to reach, about.
    pub entries: usize,
}

/// A block: hash of its own tokens, and of the whole prefix that ends there.
pub type Block = (u64, u64);

/// What one worker says in one event.
pub struct Event<'a> {
    /// Who holds the blocks.
    pub worker: usize,
    /// The block before the first; 0: none.
    pub parent: u64,
    /// Consecutive blocks, in the order of the prompt if stored, from its end if removed.
    pub blocks: Vec<&'a Block>,
}

/// The prompts of a scenario.
pub struct Workload {
    /// What was asked for.
    pub scenario: Scenario,
    /// Blocks of each.
    pub prompts: Vec<Vec<Block>>,
}

/// Numbers that repeat from run to run (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    /// The next.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).max(1)
}

fn extend(prompt: &mut Vec<Block>, blocks: usize, numbers: &mut Numbers) {
    let mut hash = prompt.last().map_or(0, |block| block.1);
    for _ in 0..blocks {
        let local = numbers.next();
        hash = mix(hash ^ local);
        prompt.push((local, hash));
    }
}

impl Workload {
    /// The prompts of a scenario.
    pub fn new(scenario: Scenario) -> Workload {
        let mut numbers = Numbers(scenario.blocks as u64);
        let count = (scenario.entries / scenario.holders / scenario.blocks).max(1);
        let mut prompts: Vec<Vec<Block>> = Vec::with_capacity(count);
        for number in 0..count {
            let mut prompt = match number % GROUP {
                0 => Vec::new(),
                at => prompts[number - at][..shared(scenario.blocks)].to_vec(),
            };
            let missing = scenario.blocks - prompt.len();
            extend(&mut prompt, missing, &mut numbers);
            prompts.push(prompt);
        }
        Workload { scenario, prompts }
    }

    /// Who holds a prompt: the same workers for its whole group.
    fn holders(&self, prompt: usize) -> impl Iterator<Item = usize> {
        let Scenario {
            workers, holders, ..
        } = self.scenario;
        let first = prompt / GROUP * holders;
        (0..holders).map(move |at| (first + at) % workers)
    }

    /// What is stored, in order, one prompt after the other.
    pub fn stores(&self, prompt: usize) -> Vec<Event<'_>> {
        let blocks = &self.prompts[prompt];
        let start = if prompt.is_multiple_of(GROUP) {
            0
        } else {
            shared(blocks.len())
        };
        let mut events = Vec::new();
        for worker in self.holders(prompt) {
            for from in (start..blocks.len()).step_by(self.scenario.step) {
                let to = blocks.len().min(from + self.scenario.step);
                events.push(Event {
                    worker,
                    parent: if from == 0 { 0 } else { blocks[from - 1].1 },
                    blocks: blocks[from..to].iter().collect(),
                });
            }
        }
        events
    }

    /// What is removed when a prompt goes: from its end, the shared part with the last of its group.
    pub fn removals(&self, prompt: usize) -> Vec<Event<'_>> {
        let last = (prompt + 1).is_multiple_of(GROUP) || prompt + 1 == self.prompts.len();
        let blocks = &self.prompts[prompt];
        let start = if last { 0 } else { shared(blocks.len()) };
        let mut events = Vec::new();
        for worker in self.holders(prompt) {
            for chunk in blocks[start..].rchunks(self.scenario.step) {
                events.push(Event {
                    worker,
                    parent: 0,
                    blocks: chunk.iter().rev().collect(),
                });
            }
        }
        events
    }

    /// Prompts to ask for, at most `limit`: the first `known` blocks of stored ones, then unknown ones.
    pub fn questions(&self, known: usize, limit: usize) -> Vec<Vec<Block>> {
        let mut numbers = Numbers(1 << 40);
        let stride = self.prompts.len().div_ceil(limit);
        let asked = self.prompts.iter().step_by(stride);
        asked
            .map(|stored| {
                let mut prompt = stored[..known].to_vec();
                extend(&mut prompt, stored.len() - known, &mut numbers);
                prompt
            })
            .collect()
    }
}

fn shared(blocks: usize) -> usize {
    blocks / 4
}
