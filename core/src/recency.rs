//! When blocks were used last, and how long they had been idle when their engine evicted them.

/// Tenths of a second since a day before the first time that the index heard, which may have been one to come. 13 years
/// fit.
pub type Stamp = u32;
/// A time that nobody told.
pub const UNKNOWN: Stamp = 0;

const STAMPS_PER_S: f64 = 10.0;
const DAY_S: f64 = 86_400.0;
const REMOVALS: usize = 64;
/// Fewer removals say too little of a turnover.
const LEAST_REMOVALS: usize = 16;

/// Seconds of any epoch to stamps.
#[derive(Default)]
pub struct Clock {
    began: Option<f64>,
    /// The time of what comes next.
    pub now: Stamp,
}

impl Clock {
    /// None, or no number: what comes next has no time.
    pub fn set(&mut self, now: Option<f64>) {
        let Some(now) = now.filter(|now| now.is_finite()) else {
            self.now = UNKNOWN;
            return;
        };
        let began = *self.began.get_or_insert(now - DAY_S);
        // The cast saturates.
        self.now = ((now - began) * STAMPS_PER_S) as Stamp;
        self.now = self.now.saturating_add(1);
    }

    /// Seconds from a stamp until now, where both are known; below 0 if it is still to come.
    pub fn since(&self, stamp: Stamp) -> Option<f64> {
        let known = stamp != UNKNOWN && self.now != UNKNOWN;
        known.then(|| (f64::from(self.now) - f64::from(stamp)) / STAMPS_PER_S)
    }
}

/// The last removals of one rank and tier: how long each had been idle.
#[derive(Default)]
pub struct Removals {
    ages: Vec<f32>,
    next: usize,
    median: Option<f32>,
    /// Removals came since the median was worked out.
    stale: bool,
    /// Removals ever.
    pub count: u64,
}

impl Removals {
    /// Takes ages in seconds.
    pub fn extend(&mut self, ages: impl Iterator<Item = f64>) {
        for age in ages {
            let age = age as f32;
            match self.ages.get_mut(self.next) {
                Some(oldest) => *oldest = age,
                None => self.ages.push(age),
            }
            self.next = (self.next + 1) % REMOVALS;
            self.count += 1;
            self.stale = true;
        }
    }

    /// Median age of the last 64, seconds; None: too few were seen.
    pub fn median(&mut self) -> Option<f64> {
        if self.stale && self.ages.len() >= LEAST_REMOVALS {
            let mut ages = [0.0; REMOVALS];
            let ages = &mut ages[..self.ages.len()];
            ages.copy_from_slice(&self.ages);
            let middle = ages.len() / 2;
            let (_, median, _) = ages.select_nth_unstable_by(middle, f32::total_cmp);
            self.median = Some(*median);
            self.stale = false;
        }
        self.median.map(f64::from)
    }
}
