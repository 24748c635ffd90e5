//! Runs of bits in words of 64.

/// Bits `low..high` of a word, `low < high <= 64`.
pub fn mask(low: u64, high: u64) -> u64 {
    (u64::MAX >> (64 - (high - low))) << low
}

/// The first zero at or after `from`, at most `end`.
pub fn first_zero(from: u64, end: u64, word: impl Fn(u64) -> u64) -> u64 {
    let mut at = from;
    while at < end {
        let ones = u64::from((word(at / 64) >> (at % 64)).trailing_ones());
        at += ones;
        if ones == 0 || !at.is_multiple_of(64) {
            break;
        }
    }
    at.min(end).max(from.min(end))
}

/// The last zero in `from..end`.
pub fn last_zero(from: u64, end: u64, word: impl Fn(u64) -> u64) -> Option<u64> {
    let mut high = end;
    while from < high {
        let base = (high - 1) / 64 * 64;
        let low = from.max(base);
        let zeros = !word(base / 64) & mask(low - base, high - base);
        if zeros != 0 {
            return Some(base + 63 - u64::from(zeros.leading_zeros()));
        }
        high = low;
    }
    None
}

/// Sets bits `at..at + count` of `words` from the low bits of `from`, `count <= 64`.
pub fn copy(words: &mut [u64], at: usize, from: u64) {
    let (word, shift) = (at / 64, at % 64);
    words[word] |= from << shift;
    if shift != 0 && from >> (64 - shift) != 0 {
        words[word + 1] |= from >> (64 - shift);
    }
}

/// How many items from the first on are equal.
pub fn same(one: &[u64], other: &[u64]) -> usize {
    let (chunks, others) = (one.as_chunks::<8>().0, other.as_chunks::<8>().0);
    let at = 8 * chunks
        .iter()
        .zip(others)
        .take_while(|(one, other)| one == other)
        .count();
    let rest = one[at..].iter().zip(&other[at..]);
    at + rest.take_while(|(one, other)| one == other).count()
}

/// Which blocks of a prompt are held: those from the first on, and those in `bits`. Bit i is block i; a short slice
/// ends in zeros.
#[derive(Clone, Copy, Debug, Default)]
pub struct Blocks<'a> {
    /// Blocks `0..prefix`.
    pub prefix: u64,
    /// More blocks, mostly none.
    pub bits: &'a [u64],
}

impl Blocks<'_> {
    /// No block is held.
    pub fn is_empty(&self) -> bool {
        self.prefix == 0 && self.bits.is_empty()
    }

    /// Blocks `64 * at..64 * at + 64`.
    pub fn word(&self, at: u64) -> u64 {
        let more = self.bits.get(at as usize).copied().unwrap_or(0);
        match self.prefix.saturating_sub(64 * at) {
            0 => more,
            ones => mask(0, ones.min(64)) | more,
        }
    }

    /// The first of `0..end` that is not held, or `end`.
    pub fn first_missing(&self, end: u64) -> u64 {
        match self.bits.is_empty() {
            true => self.prefix.min(end),
            false => first_zero(self.prefix, end, |at| self.word(at)),
        }
    }
}
