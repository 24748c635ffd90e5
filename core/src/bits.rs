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
