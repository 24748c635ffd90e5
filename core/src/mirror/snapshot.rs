//! A snapshot in parts: which blocks, shallow first; what they hold is read when they are sent.

use std::collections::HashMap;

use super::nodes::{Delta, Deltas, Node, Nodes};
use super::units::Level;

/// Within a band of depths a chain is sent as one stretch.
const BAND: u32 = 64;

/// A snapshot under way.
#[derive(Default)]
pub struct Snapshot {
    order: Vec<u64>,
    at: usize,
    /// Lanes of `order[at]` that were sent already.
    lanes: u64,
}

impl Snapshot {
    /// What is held now; later changes travel as deltas of their own.
    pub fn new(nodes: &Nodes) -> Snapshot {
        let mut shallow: Vec<&Node> = nodes
            .iter()
            .filter(|node| node.levels().next().is_some())
            .collect();
        shallow.sort_unstable_by_key(|node| (node.depth, node.hash));
        let mut order = Vec::with_capacity(shallow.len());
        for band in shallow.chunk_by(|a, b| a.depth / BAND == b.depth / BAND) {
            // Chains of this band, each found by the hash of its end.
            let mut chains: Vec<Vec<u64>> = Vec::new();
            let mut ends: HashMap<u64, usize> = HashMap::new();
            for node in band {
                let chain = ends.remove(&node.parent).unwrap_or_else(|| {
                    chains.push(Vec::new());
                    chains.len() - 1
                });
                chains[chain].push(node.hash);
                ends.insert(node.hash, chain);
            }
            order.extend(chains.into_iter().flatten());
        }
        Snapshot {
            order,
            ..Snapshot::default()
        }
    }

    /// The next part, of at most `max_hashes` hashes. Empty: it is over.
    pub fn next(&mut self, nodes: &Nodes, max_hashes: usize) -> Vec<Delta> {
        let mut part: Vec<(u8, Level, &Node)> = Vec::new();
        'full: while let Some(&hash) = self.order.get(self.at) {
            for (lane, level) in nodes.find(hash).into_iter().flat_map(Node::levels) {
                if self.lanes >> lane & 1 == 1 {
                    continue;
                }
                if part.len() == max_hashes {
                    break 'full;
                }
                self.lanes |= 1 << lane;
                if let Some(node) = nodes.find(hash) {
                    part.push((lane, level, node));
                }
            }
            self.at += 1;
            self.lanes = 0;
        }
        part.sort_by_key(|(lane, ..)| *lane);
        let mut deltas = Deltas::default();
        for (lane, level, node) in part {
            deltas.push(lane, level, node);
        }
        deltas.done
    }
}
