//! Short campaigns of faults (`sandkeep_testkit::chaos`), one on each filesystem. `./dev chaos` runs long ones.
//!
//! `SANDKEEP_CHAOS_SEED` runs a campaign again, `SANDKEEP_CHAOS_SECONDS` makes them longer.

use std::time::Duration;

use sandkeep_testkit::chaos::{Campaign, FaultKind};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::fault_disk::{Filesystem, unfit};
use sandkeep_testkit::machine::test_kernel;

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

fn campaign(filesystem: Filesystem, seed: u64) -> Campaign {
    let seed = number("SANDKEEP_CHAOS_SEED", seed);
    let time = Duration::from_secs(number("SANDKEEP_CHAOS_SECONDS", 30));
    Campaign { time, ..Campaign::new(env!("CARGO_BIN_EXE_keep"), filesystem, seed) }
}

/// Runs a campaign, which must find nothing.
fn holds(test: &str, campaign: &Campaign) {
    if let Some(why) = unfit() {
        skipped(test, &why);
        return;
    }
    let report = campaign.run();
    let seed = campaign.seed;
    assert!(
        report.violations.is_empty(),
        "{} findings with SANDKEEP_CHAOS_SEED={seed}: {:#?}\n{}",
        report.violations.len(),
        report.violations,
        report.table()
    );
    assert!(report.total_rounds() > 0 && report.snapshots_compared > 0, "{}", report.table());
}

#[test]
fn on_ext4() {
    holds("on_ext4", &campaign(Filesystem::Ext4, 1));
}

#[test]
fn on_ext4_without_flush_at_rename() {
    holds("on_ext4_without_flush_at_rename", &campaign(Filesystem::Ext4NoAutoDaAlloc, 2));
}

#[test]
fn on_xfs() {
    holds("on_xfs", &campaign(Filesystem::Xfs, 3));
}

#[test]
fn on_btrfs() {
    holds("on_btrfs", &campaign(Filesystem::Btrfs, 4));
}

/// Machines boot slowly without hardware support: few rounds, few clients.
#[test]
fn of_machines() {
    let kernel = match test_kernel() {
        Ok(kernel) => kernel,
        Err(why) => return skipped("of_machines", &why),
    };
    let faults = vec![FaultKind::Kill, FaultKind::Cut];
    let short = Campaign {
        kernel: Some(kernel),
        faults,
        clients: 1,
        rounds: 2,
        snapshots: 2,
        ..campaign(Filesystem::Ext4, 5)
    };
    holds("of_machines", &short);
}
