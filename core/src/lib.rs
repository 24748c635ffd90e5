//! The core of servingfleet: canonical hashing, the mirror of one rank, the prefix index. No I/O, no clock.

#[cfg(feature = "python")]
mod bindings;
pub mod bits;
pub mod credits;
pub mod hash;
pub mod index;
pub mod mirror;
pub mod recency;
pub mod resume;
pub mod tree;
