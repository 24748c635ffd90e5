//! The index and its peers behind one face. Each gets its own form of an event, owned, as its decoder would hand it over.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;

use _native::index::{CONFIRMED, Index};
use _native::resume::{Class, Lane, Profile, Rule, TIERS};
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use tokio::sync::oneshot;

use crate::measure::{thread_ns, timed};
use crate::workload::{Block, Event};

const BLOCK_TOKENS: u32 = 16;

/// Blocks held from the start, by worker; workers that hold none are left out.
pub type Depths = BTreeMap<u64, u64>;

/// Something that knows who holds what. Times are nanoseconds of processor time.
pub trait Side {
    /// Takes what workers stored.
    fn store(&mut self, events: &[Event<'_>]) -> u64;
    /// Takes what workers removed.
    fn remove(&mut self, events: &[Event<'_>]) -> u64;
    /// Answers all questions, `repeats` times.
    fn find(&mut self, questions: &[Vec<Block>], repeats: usize) -> u64;
    /// The answer to one.
    fn depths(&mut self, question: &[Block]) -> Depths;
}

/// This project's index.
pub struct Ours {
    index: Index,
    replicas: Vec<u32>,
}

impl Ours {
    /// Knows its workers from the start, as relays say hello before they say what they hold.
    pub fn new(workers: usize) -> Ours {
        let gpu = Lane {
            number: 0,
            tier: 0,
            class: Class::Attention,
            group: 0,
            unit: BLOCK_TOKENS,
            upper_in_predicted: false,
            store: String::new(),
        };
        let profile = Profile {
            lanes: vec![gpu],
            rules: [Rule::default(); TIERS],
        };
        let mut index = Index::new(BLOCK_TOKENS, u64::from(u32::MAX));
        // In service the index is told the time, and says since when what it found is idle.
        index.set_time(Some(0.0));
        let replicas = (0..workers)
            .map(|_| {
                let replica = index.add_replica(&profile).expect("the profile fits");
                let known = index.set_rank(replica, 0, true, true);
                known.expect("the replica is known");
                replica
            })
            .collect();
        Ours { index, replicas }
    }

    /// Pairs of worker and block.
    pub fn entries(&self) -> u64 {
        self.index.counts().entries
    }

    fn events(&self, events: &[Event<'_>]) -> Vec<(u32, u64, Vec<u64>)> {
        let event = |event: &Event<'_>| {
            let hashes = event.blocks.iter().map(|block| block.1).collect();
            (self.replicas[event.worker], event.parent, hashes)
        };
        events.iter().map(event).collect()
    }
}

/// One token more than the blocks cover: the engine computes it in any case, and a full match counts whole.
fn prompt_tokens(blocks: usize) -> u64 {
    blocks as u64 * u64::from(BLOCK_TOKENS) + 1
}

impl Side for Ours {
    fn store(&mut self, events: &[Event<'_>]) -> u64 {
        let events = self.events(events);
        timed(|| {
            for (replica, parent, hashes) in events {
                let held = self.index.hold(replica, 0, 0, CONFIRMED, parent, &hashes);
                held.expect("the lane is known");
            }
        })
    }

    fn remove(&mut self, events: &[Event<'_>]) -> u64 {
        let events = self.events(events);
        timed(|| {
            for (replica, _, hashes) in events {
                let dropped = self.index.drop(replica, 0, 0, &hashes);
                dropped.expect("the lane is known");
            }
        })
    }

    fn find(&mut self, questions: &[Vec<Block>], repeats: usize) -> u64 {
        let mut total = 0;
        for _ in 0..repeats {
            let prompts: Vec<Vec<u64>> = questions.iter().map(|prompt| chained(prompt)).collect();
            total += timed(|| {
                for hashes in prompts {
                    let found = self.index.find(&hashes, prompt_tokens(hashes.len()), false);
                    std::hint::black_box(found.expect("the prompt is whole"));
                }
            });
        }
        total
    }

    fn depths(&mut self, question: &[Block]) -> Depths {
        let hashes = chained(question);
        let found = self.index.find(&hashes, prompt_tokens(hashes.len()), false);
        let depths = found.expect("the prompt is whole").into_iter();
        depths
            .map(|found| {
                (
                    u64::from(found.replica),
                    found.predicted / u64::from(BLOCK_TOKENS),
                )
            })
            .filter(|(_, depth)| *depth > 0)
            .collect()
    }
}

fn chained(prompt: &[Block]) -> Vec<u64> {
    prompt.iter().map(|block| block.1).collect()
}

fn local(prompt: &[Block]) -> Vec<LocalBlockHash> {
    prompt.iter().map(|block| LocalBlockHash(block.0)).collect()
}

fn scores(scores: OverlapScores) -> Depths {
    let scores = scores.scores.into_iter();
    scores
        .map(|(worker, depth)| (worker.worker_id, u64::from(depth)))
        .collect()
}

fn router_event(event: &Event<'_>, data: KvCacheEventData) -> RouterEvent {
    let cache_event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: 0,
    };
    RouterEvent::new(event.worker as u64, cache_event)
}

fn stored(event: &Event<'_>) -> RouterEvent {
    let blocks = event.blocks.iter().map(|block| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(block.1),
        tokens_hash: LocalBlockHash(block.0),
        mm_extra_info: None,
    });
    let data = KvCacheStoreData {
        parent_hash: (event.parent != 0).then_some(ExternalSequenceBlockHash(event.parent)),
        start_position: None,
        blocks: blocks.collect(),
    };
    router_event(event, KvCacheEventData::Stored(data))
}

fn removed(event: &Event<'_>) -> RouterEvent {
    let hashes = event.blocks.iter();
    let data = KvCacheRemoveData {
        block_hashes: hashes
            .map(|block| ExternalSequenceBlockHash(block.1))
            .collect(),
    };
    router_event(event, KvCacheEventData::Removed(data))
}

/// The peer's index for one thread.
#[derive(Default)]
pub struct Radix {
    tree: RadixTree,
}

impl Radix {
    fn apply(&mut self, events: Vec<RouterEvent>) -> u64 {
        timed(|| {
            for event in events {
                self.tree.apply_event(event).expect("the event is sound");
            }
        })
    }
}

impl Side for Radix {
    fn store(&mut self, events: &[Event<'_>]) -> u64 {
        self.apply(events.iter().map(stored).collect())
    }

    fn remove(&mut self, events: &[Event<'_>]) -> u64 {
        self.apply(events.iter().map(removed).collect())
    }

    fn find(&mut self, questions: &[Vec<Block>], repeats: usize) -> u64 {
        let mut total = 0;
        for _ in 0..repeats {
            let prompts: Vec<_> = questions.iter().map(|prompt| local(prompt)).collect();
            total += timed(|| {
                for prompt in prompts {
                    std::hint::black_box(self.tree.find_matches(prompt, false));
                }
            });
        }
        total
    }

    fn depths(&mut self, question: &[Block]) -> Depths {
        scores(self.tree.find_matches(local(question), false))
    }
}

/// The peer's index for many threads, its default: a thread of its own takes events, who asks reads at once.
pub struct Concurrent {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl Default for Concurrent {
    fn default() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, todo) = flume::unbounded();
        let worker = Arc::clone(&tree);
        let thread = std::thread::spawn(move || {
            worker
                .worker(todo, None)
                .expect("the worker ends when told");
        });
        Concurrent {
            tree,
            tasks,
            thread: Some(thread),
        }
    }
}

/// Called on the peer's own thread when it comes to a flush: says what time it is there, and waits for leave to go on.
struct Mark {
    passed: SyncSender<u64>,
    leave: Mutex<Option<Receiver<()>>>,
}

impl Wake for Mark {
    fn wake(self: Arc<Self>) {
        let leave = self.leave.lock().expect("nobody panics here").take();
        let mut now = thread_ns();
        if let Some(leave) = leave {
            leave.recv().expect("leave is always given");
            now = thread_ns();
        }
        self.passed.send(now).expect("somebody waits for the mark");
    }
}

impl Concurrent {
    fn send(&self, task: WorkerTask) {
        self.tasks.send(task).expect("the thread lives");
    }

    /// A flush that calls the mark, and what keeps it alive until then.
    fn mark(&self, leave: Option<Receiver<()>>) -> (Receiver<u64>, oneshot::Receiver<()>) {
        let (passed, pass) = sync_channel(1);
        let waker = Waker::from(Arc::new(Mark {
            passed,
            leave: Mutex::new(leave),
        }));
        let (flushed, mut flush) = oneshot::channel();
        let poll = std::pin::Pin::new(&mut flush).poll(&mut Context::from_waker(&waker));
        assert!(matches!(poll, Poll::Pending), "not sent yet");
        self.send(WorkerTask::Flush(flushed));
        (pass, flush)
    }

    /// The events lie ready in the thread's queue before it may start.
    fn apply(&mut self, events: Vec<RouterEvent>) -> u64 {
        let (go, leave) = sync_channel(1);
        let (started, _start) = self.mark(Some(leave));
        for event in events {
            self.send(WorkerTask::Event(event));
        }
        let (ended, _end) = self.mark(None);
        go.send(()).expect("the thread waits");
        let start = started.recv().expect("the mark is passed");
        ended.recv().expect("the mark is passed") - start
    }
}

impl Drop for Concurrent {
    fn drop(&mut self) {
        self.send(WorkerTask::Terminate);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the worker does not panic");
        }
    }
}

impl Side for Concurrent {
    fn store(&mut self, events: &[Event<'_>]) -> u64 {
        self.apply(events.iter().map(stored).collect())
    }

    fn remove(&mut self, events: &[Event<'_>]) -> u64 {
        self.apply(events.iter().map(removed).collect())
    }

    fn find(&mut self, questions: &[Vec<Block>], repeats: usize) -> u64 {
        let mut total = 0;
        for _ in 0..repeats {
            let prompts: Vec<_> = questions.iter().map(|prompt| local(prompt)).collect();
            total += timed(|| {
                for prompt in prompts {
                    std::hint::black_box(self.tree.find_matches(&prompt, false));
                }
            });
        }
        total
    }

    fn depths(&mut self, question: &[Block]) -> Depths {
        scores(self.tree.find_matches(&local(question), false))
    }
}
