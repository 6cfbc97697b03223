//! `keep stats` and `keep top`: what sandboxes use.
//!
//! The server reports sums, such as CPU time since the session began. Load and rates are computed
//! here, from two readings of the same session.

use std::collections::HashMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use sandkeep_client::Error;
use sandkeep_client::types::{LiveUsage, SandboxStats};
use serde::Serialize;

use super::{Context, bytes, or_dash, word};
use crate::args::{StatsArgs, TopArgs, TopOrder};
use crate::failure::{Failure, output_error};
use crate::screen::Table;

/// No reading more often than this.
const SHORTEST: Duration = Duration::from_millis(100);
/// How long `top` shows that the server is gone before it gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A reading, and what follows from it and the one before.
#[derive(Debug, Clone, Serialize)]
struct Reading {
    #[serde(flatten)]
    stats: SandboxStats,
    /// 100 is one whole CPU; absent in a first reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_in_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_out_per_second: Option<f64>,
}

impl Reading {
    fn new(stats: SandboxStats, before: Option<&SandboxStats>) -> Self {
        let same = before.filter(|before| before.session == stats.session);
        let seconds =
            same.map(|before| stats.at_ms.saturating_sub(before.at_ms)).filter(|ms| *ms > 0);
        let rate = |of: fn(&LiveUsage) -> u64| {
            let (now, then) = (of(stats.usage.as_ref()?), of(same?.usage.as_ref()?));
            Some(quotient(now.saturating_sub(then), seconds?) * 1000.0)
        };
        let cpu_percent = rate(|usage| usage.cpu_ms).map(|rate| rate / 10.0);
        let network_in_per_second = rate(|usage| usage.network_in_bytes);
        let network_out_per_second = rate(|usage| usage.network_out_bytes);
        Self { stats, cpu_percent, network_in_per_second, network_out_per_second }
    }

    fn sum(&self, order: TopOrder) -> f64 {
        let of = |of: fn(&LiveUsage) -> u64| self.stats.usage.as_ref().map_or(0, of);
        match order {
            TopOrder::Cpu => self.cpu_percent.unwrap_or(0.0),
            TopOrder::Memory => quotient(of(|usage| usage.memory_bytes), 1),
            TopOrder::Network => {
                self.network_in_per_second.unwrap_or(0.0)
                    + self.network_out_per_second.unwrap_or(0.0)
            }
            TopOrder::Disk => quotient(of(|usage| usage.disk_bytes.unwrap_or(0)), 1),
            TopOrder::Name => 0.0,
        }
    }
}

#[allow(clippy::cast_precision_loss)]
fn quotient(of: u64, by: u64) -> f64 {
    of as f64 / by as f64
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn per_second(rate: Option<f64>) -> String {
    or_dash(rate.map(|rate| format!("{}/s", bytes(rate.max(0.0) as u64))))
}

pub(super) async fn stats(context: &Context, args: &StatsArgs) -> Result<(), Failure> {
    let interval = args.interval.duration().max(SHORTEST);
    let mut before = read(context, &args.names).await?;
    loop {
        tokio::time::sleep(interval).await;
        let now = match read(context, &args.names).await {
            // It is restarted: `--follow` continues.
            Err(Failure::Client(error)) if args.follow && error.may_pass() => continue,
            now => now?,
        };
        let readings = compared(&before, now.clone());
        match (context.screen.json, args.follow, args.names.as_slice()) {
            (true, true, _) => {
                readings.iter().try_for_each(|one| context.screen.json_line(one))?;
            }
            (true, false, [_]) => context.screen.json(&readings.first())?,
            (true, false, _) => context.screen.json(&readings)?,
            (false, ..) => context.screen.text(&listed(context, &readings))?,
        }
        if !args.follow {
            return Ok(());
        }
        before = now;
    }
}

pub(super) async fn top(context: &Context, args: &TopArgs) -> Result<(), Failure> {
    if context.screen.json || !std::io::stdout().is_terminal() {
        return Err(Failure::here("`keep top` needs a terminal")
            .with_hint("use `keep stats --follow`, with --json for programs"));
    }
    let screen = FullScreen::begin()?;
    let work = watch(context, args, &screen);
    tokio::select! {
        done = work => done,
        // Ctrl-C is how it ends.
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn watch(context: &Context, args: &TopArgs, screen: &FullScreen) -> Result<(), Failure> {
    let interval = args.interval.duration().max(SHORTEST);
    let mut before = read(context, &[]).await?;
    let mut gone = Duration::ZERO;
    loop {
        let (text, wait) = match read(context, &[]).await {
            Ok(now) => {
                gone = Duration::ZERO;
                let mut readings = compared(&before, now.clone());
                // Equal ones stay in the order of their names.
                readings.sort_by(|one, other| other.sum(args.sort).total_cmp(&one.sum(args.sort)));
                before = now;
                let header = format!("{}\n\n", summary(&readings));
                (header + &listed(context, &readings) + "\nCtrl-C ends\n", interval)
            }
            Err(Failure::Client(error)) if error.may_pass() && gone < PATIENCE => {
                gone += interval;
                (format!("the server does not answer: {error}\n"), interval)
            }
            Err(error) => return Err(error),
        };
        screen.show(&text)?;
        tokio::time::sleep(wait).await;
    }
}

/// Those that are named, in order, or all that run.
async fn read(context: &Context, names: &[String]) -> Result<Vec<SandboxStats>, Failure> {
    if names.is_empty() {
        return match context.client.all_stats().await {
            Err(Error::Api { status: 404, code, .. }) if code == "route_not_found" => {
                Err(Failure::here("the server is of a version without `stats`")
                    .with_hint("upgrade the server"))
            }
            found => Ok(found?),
        };
    }
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        found.push(context.client.stats(name).await?);
    }
    Ok(found)
}

fn compared(before: &[SandboxStats], now: Vec<SandboxStats>) -> Vec<Reading> {
    let before: HashMap<&str, &SandboxStats> =
        before.iter().map(|stats| (stats.name.as_str(), stats)).collect();
    let reading = |stats: SandboxStats| {
        let earlier = before.get(stats.name.as_str()).copied();
        Reading::new(stats, earlier)
    };
    now.into_iter().map(reading).collect()
}

fn listed(context: &Context, readings: &[Reading]) -> String {
    let mut table = Table::new(&[
        "NAME",
        "STATE",
        ">CPU",
        ">MEMORY",
        ">LIMIT",
        ">PROCS",
        ">NET IN",
        ">NET OUT",
        ">DISK",
        ">COMMANDS",
    ]);
    for reading in readings {
        let usage = reading.stats.usage.as_ref();
        let size = |of: fn(&LiveUsage) -> u64| or_dash(usage.map(|usage| bytes(of(usage))));
        table.row(vec![
            reading.stats.name.clone(),
            word(reading.stats.state),
            or_dash(reading.cpu_percent.map(|percent| format!("{percent:.0} %"))),
            size(|usage| usage.memory_bytes),
            size(|usage| usage.memory_limit_bytes),
            or_dash(usage.and_then(|usage| usage.processes).map(|count| count.to_string())),
            per_second(reading.network_in_per_second),
            per_second(reading.network_out_per_second),
            or_dash(usage.and_then(|usage| usage.disk_bytes).map(bytes)),
            or_dash(usage.map(|usage| usage.commands.to_string())),
        ]);
    }
    context.screen.table(&table)
}

fn summary(readings: &[Reading]) -> String {
    let cpu: f64 = readings.iter().map(|reading| reading.sum(TopOrder::Cpu)).sum();
    let memory: u64 = readings
        .iter()
        .filter_map(|reading| Some(reading.stats.usage.as_ref()?.memory_bytes))
        .sum();
    let (count, memory) = (readings.len(), bytes(memory));
    format!("{count} sandboxes run; CPU {cpu:.0} % of one, memory {memory}")
}

/// The other screen of the terminal, until it is dropped.
struct FullScreen;

impl FullScreen {
    fn begin() -> Result<Self, Failure> {
        write("\x1b[?1049h\x1b[?25l")?;
        Ok(Self)
    }

    fn show(&self, text: &str) -> Result<(), Failure> {
        // Each line is cleared to its end, and what is below the last one: so nothing flickers.
        let text = text.replace('\n', "\x1b[K\r\n");
        write(&format!("\x1b[H{text}\x1b[J"))
    }
}

impl Drop for FullScreen {
    fn drop(&mut self) {
        let _ = write("\x1b[?25h\x1b[?1049l");
    }
}

fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(output_error)
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::{LiveUsage, SandboxStats, State};

    use super::Reading;

    fn stats(session: &str, at_ms: u64, cpu_ms: u64, network_in_bytes: u64) -> SandboxStats {
        let usage = LiveUsage {
            cpu_ms,
            cpu_limit_millis: 2000,
            memory_bytes: 1,
            memory_peak_bytes: 1,
            memory_limit_bytes: 1,
            processes: Some(1),
            processes_limit: 1,
            network_in_bytes,
            network_out_bytes: 0,
            disk_bytes: None,
            disk_limit_bytes: 1,
            commands: 0,
            wall_ms: 1,
        };
        let (session, usage) = (Some(session.to_owned()), Some(usage));
        SandboxStats { name: "a".to_owned(), state: State::Running, at_ms, session, usage }
    }

    #[test]
    fn load_is_the_difference_of_two_readings_of_one_session() {
        let first = stats("ses-1", 1_000, 500, 10);
        let reading = Reading::new(stats("ses-1", 3_000, 3_500, 4_010), Some(&first));
        assert_eq!(reading.cpu_percent, Some(150.0));
        assert_eq!(reading.network_in_per_second, Some(2000.0));
        let other = Reading::new(stats("ses-2", 3_000, 100, 0), Some(&first));
        assert_eq!((other.cpu_percent, other.network_in_per_second), (None, None));
        assert_eq!(Reading::new(first.clone(), Some(&first)).cpu_percent, None, "at the same time");
        assert_eq!(Reading::new(first, None).cpu_percent, None);
    }
}
