//! Times and spans in the words people use.

use std::time::Duration;

use jiff::Timestamp;

/// How long ago `text` was: `3m`, `2h`, `5d`. What is no timestamp is returned as it is.
pub(crate) fn ago(text: &str) -> String {
    let Ok(then) = text.parse::<Timestamp>() else { return text.to_owned() };
    let millis = Timestamp::now().as_millisecond() - then.as_millisecond();
    match u64::try_from(millis) {
        Ok(millis) => format!("{} ago", rough(millis)),
        Err(_) => format!("in {}", ahead(millis.unsigned_abs())),
    }
}

/// A number of milliseconds until something happens, rounded up: what was set to 30 days a moment
/// ago is still 30 days away.
pub(crate) fn ahead(millis: u64) -> String {
    match millis {
        0..60_000 => format!("{}s", millis.div_ceil(1000)),
        _ => rough(millis + 59_999),
    }
}

/// How long from now `text` is, or `-`.
pub(crate) fn until(text: Option<&str>) -> String {
    text.map_or_else(|| "-".to_owned(), ago)
}

/// A number of milliseconds in one unit.
pub(crate) fn rough(millis: u64) -> String {
    match millis / 1000 {
        0..60 => format!("{}s", millis / 1000),
        60..3600 => format!("{}m", millis / 60_000),
        3600..172_800 => format!("{}h", millis / 3_600_000),
        _ => format!("{}d", millis / 86_400_000),
    }
}

/// A number of milliseconds as exactly as people care.
pub(crate) fn exact(millis: u64) -> String {
    let span = Duration::from_millis(millis);
    match span.as_secs() {
        0 if millis == 0 => "0s".to_owned(),
        0 => format!("{:.3}s", span.as_secs_f64()),
        1..60 if span.subsec_millis() < 50 => format!("{}s", span.as_secs()),
        1..60 => format!("{:.1}s", span.as_secs_f64()),
        seconds @ 60..3600 => two(seconds / 60, "m", seconds % 60, "s"),
        seconds @ 3600..172_800 => two(seconds / 3600, "h", seconds % 3600 / 60, "m"),
        seconds => two(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

fn two(large: u64, unit: &str, small: u64, smaller: &str) -> String {
    match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit} {small}{smaller}"),
    }
}

/// How long something took, or has been taking.
pub(crate) fn between(start: &str, end: Option<&str>) -> String {
    let end = match end {
        Some(end) => end.parse(),
        None => Ok(Timestamp::now()),
    };
    match (start.parse::<Timestamp>(), end) {
        (Ok(start), Ok(end)) => {
            let millis = end.as_millisecond() - start.as_millisecond();
            exact(u64::try_from(millis).unwrap_or(0))
        }
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{ahead, between, exact, rough};

    #[test]
    fn what_is_ahead_is_not_said_to_be_further_than_it_is() {
        let said = [1, 11_200, 60_000, 60_001, 3_599_000, 2_591_999_000].map(ahead);
        assert_eq!(said, ["1s", "12s", "1m", "2m", "1h", "30d"]);
    }

    #[test]
    fn spans_are_said_in_few_words() {
        let said = [0, 59_999, 60_000, 7_200_000, 200_000_000].map(rough);
        assert_eq!(said, ["0s", "59s", "1m", "2h", "2d"]);
        let said = [7, 1500, 61_000, 900_000, 7_260_000, 180_000_000].map(exact);
        assert_eq!(said, ["0.007s", "1.5s", "1m 1s", "15m", "2h 1m", "2d 2h"]);
        assert_eq!([0, 30_000, 59_940].map(exact), ["0s", "30s", "59.9s"]);
        assert_eq!(between("2026-01-01T00:00:00Z", Some("2026-01-01T00:00:02Z")), "2s");
    }
}
