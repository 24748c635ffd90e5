//! Canonical hashing beside the raw hash function and the peer's hashing.

use _native::hash::{chain, namespace_root};
use dynamo_kv_router::protocols::{
    BlockHashOptions, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use serde_json::{Value, json};
use std::hint::black_box;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::measure::{median, timed};
use crate::workload::Numbers;

const BLOCK_TOKENS: usize = 16;

/// Tokens per second: ours, the hash function alone, the peer.
pub fn rows(quick: bool) -> Vec<Value> {
    let rounds = if quick { 9 } else { 25 };
    [512, 32_768]
        .map(|tokens| row(tokens, rounds, 8 * 32_768 / tokens))
        .into()
}

fn row(count: usize, rounds: usize, repeats: usize) -> Value {
    let mut numbers = Numbers(7);
    let tokens: Vec<u32> = (0..count)
        .map(|_| (numbers.next() % 150_000) as u32)
        .collect();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let root = namespace_root("model", "", "", false);
    let mut samples: [Vec<f64>; 4] = Default::default();
    let rate = |work: &dyn Fn()| {
        let ns = timed(|| (0..repeats).for_each(|_| work()));
        (repeats * count) as f64 * 1e3 / ns as f64
    };
    for _ in 0..rounds {
        samples[0].push(rate(&|| {
            black_box(chain(root, black_box(&bytes), BLOCK_TOKENS, &[], false));
        }));
        samples[1].push(rate(&|| {
            black_box(links(root, black_box(&bytes)));
        }));
        samples[2].push(rate(&|| {
            black_box(xxh3_64_with_seed(black_box(&bytes), root));
        }));
        samples[3].push(rate(&|| {
            let options = BlockHashOptions::default();
            let local = compute_block_hash_for_seq(&tokens, BLOCK_TOKENS as u32, options);
            black_box(compute_seq_hash_for_block(&local));
        }));
    }
    let [ours, linked, whole, peer] = samples.map(median);
    json!({
        "what": "hash",
        "tokens": count,
        "unit": "million tokens/s",
        "ours": ours,
        "linked": linked,
        "whole": whole,
        "peer": peer,
    })
}

/// The least that any chain of such blocks costs: one call for each, which needs the one before.
fn links(root: u64, bytes: &[u8]) -> u64 {
    let mut hash = root;
    for block in bytes.chunks_exact(BLOCK_TOKENS * 4) {
        let mut input = [0; 8 + BLOCK_TOKENS * 4];
        input[..8].copy_from_slice(&hash.to_le_bytes());
        input[8..].copy_from_slice(block);
        hash = xxh3_64_with_seed(&input, root);
    }
    hash
}
