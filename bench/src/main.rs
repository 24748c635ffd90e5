//! `servingfleet-bench [--quick]`: the core's hot paths beside their peers, one JSON object a line.
//!
//! Times are processor time of the thread that works, medians over rounds in which the sides take turns.

mod hashing;
mod index;
mod measure;
mod sides;
mod workload;

#[global_allocator]
static ALLOCATOR: measure::Counting = measure::Counting;

fn main() {
    let mut quick = false;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--quick" => quick = true,
            other => {
                eprintln!("unknown argument {other:?}; known: --quick");
                std::process::exit(2);
            }
        }
    }
    for row in hashing::rows(quick).into_iter().chain(index::rows(quick)) {
        println!("{row}");
    }
}
