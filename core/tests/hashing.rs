//! The published vectors, which the Python side checks against a second implementation.

use _native::hash::{Media, chain, namespace_root};
use serde_json::Value;

const VECTORS: &str = include_str!("../../tests/unit/core/hash_vectors.json");

fn text<'a>(vector: &'a Value, field: &str) -> &'a str {
    vector[field].as_str().expect("a string")
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn list<'a>(vector: &'a Value, field: &str) -> &'a [Value] {
    vector[field].as_array().expect("a list")
}

fn bytes(hex: &str) -> Box<[u8]> {
    let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
    let byte = |digits| u8::from_str_radix(digits, 16).expect("two digits");
    digits.map(byte).collect()
}

#[test]
fn the_published_vectors_come_out() {
    let file: Value = serde_json::from_str(VECTORS).expect("JSON");
    let vectors = list(&file, "vectors");
    assert!(vectors.len() > 10);
    for vector in vectors {
        let name = text(vector, "name");
        let pairs = vector["pairs"].as_bool().expect("a boolean");
        let tokens = list(vector, "tokens").iter();
        let tokens: Vec<u8> = tokens
            .flat_map(|id| (number(id) as u32).to_le_bytes())
            .collect();
        let media = list(vector, "media").iter();
        let media: Vec<Media> = media
            .map(|item| {
                (
                    number(&item[0]) as u32,
                    bytes(item[1].as_str().expect("hex")),
                )
            })
            .collect();
        let [model, adapter, salt] = ["model", "adapter", "cache_salt"].map(|of| text(vector, of));
        let root = namespace_root(model, adapter, salt, pairs);
        assert_eq!(format!("{root:016x}"), text(vector, "root"), "{name}");
        let block = number(&vector["block_tokens"]) as usize;
        let hashes = chain(root, &tokens, block, &media, pairs);
        let hashes: Vec<String> = hashes.iter().map(|hash| format!("{hash:016x}")).collect();
        let want: Vec<&str> = list(vector, "hashes")
            .iter()
            .map(|hash| hash.as_str().expect("hex"))
            .collect();
        assert_eq!(hashes, want, "{name}");
    }
}
