//! Worked examples of the resume function, blocks of 16 tokens.

use _native::bits::Blocks;
use _native::resume::{Class, Credited, Held, Lane, Plan, Profile, Question, Rule, View};

fn lane(number: u8, tier: usize, class: Class, group: u32, unit: u32) -> Lane {
    Lane {
        number,
        tier,
        class,
        group,
        unit,
        upper_in_predicted: false,
        store: String::new(),
    }
}

fn resumed(profile: &Profile, prompt: u64, confirmed: &[u64]) -> [u64; 4] {
    let plan = Plan::new(profile, 16).expect("units that fit");
    let held: Vec<Held<'_>> = confirmed
        .iter()
        .map(|bits| Held {
            confirmed: Blocks {
                prefix: 0,
                bits: std::slice::from_ref(bits),
            },
            upper: Blocks::default(),
        })
        .collect();
    let question = Question {
        plan: &plan,
        prompt,
        blocks: prompt / 16,
        held: &held,
        credited: Credited::default(),
    };
    let lower = question.resumed(View::Lower);
    assert_eq!(question.views().lower, lower);
    lower
}

fn gpu_and_host(host_unit: u32) -> Profile {
    let mut profile = Profile {
        lanes: vec![
            lane(0, 0, Class::Attention, 0, 16),
            lane(1, 1, Class::Attention, 0, host_unit),
        ],
        ..Profile::default()
    };
    profile.rules[1] = Rule {
        whole_prompt: true,
        less_units: 0,
        extends: true,
    };
    profile
}

#[test]
fn the_last_token_of_a_prompt_is_computed_again() {
    let profile = Profile {
        lanes: vec![lane(0, 0, Class::Attention, 0, 16)],
        ..Profile::default()
    };
    assert_eq!(resumed(&profile, 64, &[0b1111]), [48, 0, 0, 0]);
    assert_eq!(resumed(&profile, 65, &[0b1111]), [64, 0, 0, 0]);
}

#[test]
fn a_hole_ends_attention() {
    let profile = Profile {
        lanes: vec![lane(0, 0, Class::Attention, 0, 16)],
        ..Profile::default()
    };
    assert_eq!(resumed(&profile, 100, &[0b111_1011]), [32, 0, 0, 0]);
}

#[test]
fn a_host_hit_may_cover_the_whole_prompt() {
    assert_eq!(
        resumed(&gpu_and_host(16), 64, &[0b1111, 0b1111]),
        [48, 16, 0, 0]
    );
}

#[test]
fn the_walk_never_returns_to_a_faster_tier() {
    assert_eq!(
        resumed(&gpu_and_host(16), 97, &[0b11_0001, 0b00_1110]),
        [16, 48, 0, 0]
    );
}

#[test]
fn the_host_extends_by_whole_units_only() {
    // Its boundary at 64 is there, but adds less than a unit to the 48 tokens of the GPU.
    assert_eq!(
        resumed(&gpu_and_host(32), 97, &[0b00_0111, 0b00_1100]),
        [48, 0, 0, 0]
    );
    assert_eq!(
        resumed(&gpu_and_host(32), 97, &[0b00_0111, 0b11_1100]),
        [48, 48, 0, 0]
    );
    assert_eq!(
        resumed(&gpu_and_host(32), 97, &[0b00_0111, 0b00_1000]),
        [48, 0, 0, 0]
    );
}

#[test]
fn a_window_needs_the_blocks_before_the_boundary_only() {
    let lanes = vec![
        lane(0, 0, Class::Attention, 0, 16),
        lane(1, 0, Class::Window(33), 1, 16),
    ];
    let profile = Profile {
        lanes,
        ..Profile::default()
    };
    assert_eq!(
        resumed(&profile, 97, &[0b11_1111, 0b01_1000]),
        [80, 0, 0, 0]
    );
    assert_eq!(
        resumed(&profile, 97, &[0b11_1111, 0b01_0101]),
        [16, 0, 0, 0]
    );
}

#[test]
fn a_recurrent_state_resumes_at_its_own_end() {
    let lanes = vec![
        lane(0, 0, Class::Attention, 0, 16),
        lane(1, 0, Class::Recurrent, 1, 32),
    ];
    let profile = Profile {
        lanes,
        ..Profile::default()
    };
    assert_eq!(
        resumed(&profile, 97, &[0b11_1111, 0b00_1100]),
        [64, 0, 0, 0]
    );
    assert_eq!(resumed(&profile, 97, &[0b11_1111, 0b00_1000]), [0, 0, 0, 0]);
}

#[test]
fn speculative_decoding_takes_a_unit_off() {
    let mut profile = Profile {
        lanes: vec![lane(0, 0, Class::Attention, 0, 16)],
        ..Profile::default()
    };
    profile.rules[0].less_units = 1;
    assert_eq!(resumed(&profile, 97, &[0b1111]), [48, 0, 0, 0]);
    assert_eq!(resumed(&profile, 97, &[0b1]), [0, 0, 0, 0]);
}

#[test]
fn a_unit_smaller_than_the_block_is_capped_by_itself() {
    let profile = Profile {
        lanes: vec![lane(0, 0, Class::Attention, 0, 1)],
        ..Profile::default()
    };
    assert_eq!(resumed(&profile, 64, &[0b1111]), [63, 0, 0, 0]);
}

#[test]
fn a_unit_that_fits_no_block_is_refused() {
    let profile = Profile {
        lanes: vec![lane(0, 0, Class::Attention, 0, 24)],
        ..Profile::default()
    };
    assert!(Plan::new(&profile, 16).is_err());
}
