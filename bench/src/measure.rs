//! Processor time of a thread, and live heap bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Nanoseconds of processor time that this thread has used: other processes on the machine don't count.
pub fn thread_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes one timespec, which is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds of this thread that `work` takes.
pub fn timed(work: impl FnOnce()) -> u64 {
    let start = thread_ns();
    work();
    thread_ns() - start
}

/// The median; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Header that glibc puts before each allocation.
const CHUNK_BYTES: usize = 8;

static COUNTING: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts what each allocation really takes while `count` says so.
pub struct Counting;

fn account(pointer: *mut u8, taken: bool) {
    if pointer.is_null() || !COUNTING.load(Relaxed) {
        return;
    }
    // SAFETY: the pointer is live and from malloc.
    let bytes = unsafe { libc::malloc_usable_size(pointer.cast()) } + CHUNK_BYTES;
    if taken {
        LIVE.fetch_add(bytes, Relaxed);
    } else {
        LIVE.fetch_sub(bytes, Relaxed);
    }
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc(layout) };
        account(pointer, true);
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc_zeroed(layout) };
        account(pointer, true);
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        account(pointer, false);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        account(pointer, false);
        let moved = unsafe { System.realloc(pointer, layout, size) };
        account(moved, true);
        moved
    }
}

/// Starts or stops counting. What was allocated before must not be freed while counting.
pub fn count(on: bool) {
    LIVE.store(1 << 60, Relaxed);
    COUNTING.store(on, Relaxed);
}

/// Bytes live, from an arbitrary zero.
pub fn live_bytes() -> usize {
    LIVE.load(Relaxed)
}
