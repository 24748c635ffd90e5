//! The canonical hash recipe, docs/protocol.md. Relay and router both hash through this file.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Name of the recipe.
pub const VERSION: &str = "sf1";

/// "sfleet01", read as a big-endian number.
const SEED: u64 = 0x7366_6c65_6574_3031;

/// A media item: index of its first token, key.
pub type Media = (u32, Box<[u8]>);

/// No block. A block's hash is never this.
pub const NO_BLOCK: u64 = 0;

#[inline(always)]
fn digest(bytes: &[u8]) -> u64 {
    match xxh3_64_with_seed(bytes, SEED) {
        NO_BLOCK => 1,
        hash => hash,
    }
}

/// Spreads keys over a table: canonical hashes are spread already, but a lying peer's are not.
pub fn spread(key: u64) -> u64 {
    (key ^ (key >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Hash before the first block.
pub fn namespace_root(model: &str, adapter: &str, cache_salt: &str, pairs: bool) -> u64 {
    let form = if pairs { "pair" } else { "token" };
    let mut bytes = Vec::with_capacity(64);
    for field in [VERSION, model, adapter, cache_salt, form] {
        bytes.extend_from_slice(&length(field.len()));
        bytes.extend_from_slice(field.as_bytes());
    }
    digest(&bytes)
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

/// Full blocks in `tokens` tokens.
pub fn full_blocks(tokens: usize, block_tokens: usize, pairs: bool) -> usize {
    tokens.saturating_sub(usize::from(pairs)) / block_tokens
}

/// Tokens of the usual block: 16 of 4 bytes.
const USUAL_BYTES: usize = 64;

/// `chain` of usual blocks without media: of a length known beforehand the hash is cheaper.
fn usual_chain(parent: u64, tokens: &[u8]) -> Vec<u64> {
    let blocks = tokens.as_chunks::<USUAL_BYTES>().0;
    let mut hash = parent;
    let next = |block: &[u8; USUAL_BYTES]| {
        let mut bytes = [0; 8 + USUAL_BYTES];
        bytes[..8].copy_from_slice(&hash.to_le_bytes());
        bytes[8..].copy_from_slice(block);
        hash = digest(&bytes);
        hash
    };
    blocks.iter().map(next).collect()
}

/// Hashes of the full blocks of `tokens` (packed u32) that follow `parent`.
///
/// `media` is ascending by index, relative to the first token; items beyond the last full block are ignored.
pub fn chain(
    parent: u64,
    tokens: &[u8],
    block_tokens: usize,
    media: &[Media],
    pairs: bool,
) -> Vec<u64> {
    let blocks = full_blocks(tokens.len() / 4, block_tokens, pairs);
    let width = (block_tokens + usize::from(pairs)) * 4;
    if media.is_empty() && !pairs && width == USUAL_BYTES {
        return usual_chain(parent, tokens);
    }
    let mut bytes = vec![0; 8 + width];
    let mut items = media.iter().peekable();
    let mut hash = parent;
    let mut hashes = Vec::with_capacity(blocks);
    for block in 0..blocks {
        let start = block * block_tokens;
        bytes[..8].copy_from_slice(&hash.to_le_bytes());
        bytes[8..8 + width].copy_from_slice(&tokens[start * 4..start * 4 + width]);
        while let Some((index, key)) =
            items.next_if(|(index, _)| (*index as usize) < start + block_tokens)
        {
            let within = (*index as usize).saturating_sub(start) as u32;
            bytes.extend_from_slice(&within.to_le_bytes());
            bytes.extend_from_slice(&length(key.len()));
            bytes.extend_from_slice(key);
        }
        hash = digest(&bytes);
        bytes.truncate(8 + width);
        hashes.push(hash);
    }
    hashes
}
