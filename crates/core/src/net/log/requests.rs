//! Limits the rate of lines about HTTP requests, so that a sandbox cannot fill the journal.
//!
//! Requests with the same method, host, rule and verdict form a group. Per second, the first [`PER_GROUP`] requests of a group get a
//! line each; the rest of the group share one line with their count. At most [`IN_TOTAL`] lines per second are written one by one,
//! over all groups.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::model::{Connection, Verdict};

pub(super) const WINDOW: Duration = Duration::from_secs(1);
const PER_GROUP: usize = 20;
const IN_TOTAL: usize = 100;

type RequestGroupKey = (Option<String>, Option<String>, String, Verdict);

/// Decides which requests get a line of their own and which are only counted.
#[derive(Debug, Default)]
pub(super) struct RequestLimiter(Mutex<Option<RequestWindow>>);

#[derive(Debug)]
struct RequestWindow {
    opened: Instant,
    written: usize,
    groups: HashMap<RequestGroupKey, Group>,
    /// Requests of groups beyond the limit.
    overflow: Group,
}

#[derive(Debug, Default)]
struct Group {
    written: usize,
    counted: u64,
    last: Option<Connection>,
}

impl RequestLimiter {
    /// Adds a line. Returns the lines to write now, and whether a new window was opened: then call [`expire`](Self::expire) when it ends.
    pub(super) fn add(&self, line: Connection) -> (Vec<Connection>, bool) {
        let mut lines = self.expire(WINDOW);
        let mut held = self.window();
        let is_new = held.is_none();
        let window = held.get_or_insert_with(|| RequestWindow {
            opened: Instant::now(),
            written: 0,
            groups: HashMap::new(),
            overflow: Group::default(),
        });
        let is_full = window.groups.len() >= IN_TOTAL;
        let group = match window.groups.get_mut(&key(&line)) {
            Some(group) => group,
            None if is_full => &mut window.overflow,
            None => window.groups.entry(key(&line)).or_default(),
        };
        if group.written < PER_GROUP && window.written < IN_TOTAL {
            group.written += 1;
            window.written += 1;
            lines.push(line);
        } else {
            group.counted += 1;
            group.last = Some(line);
        }
        (lines, is_new)
    }

    /// Closes a window of at least this age, and returns the lines for what was only counted in it.
    pub(super) fn expire(&self, age: Duration) -> Vec<Connection> {
        let over = self.window().take_if(|window| window.opened.elapsed() >= age);
        let Some(RequestWindow { groups, overflow, .. }) = over else { return Vec::new() };
        let mut lines: Vec<_> = groups.into_values().filter_map(Group::line).collect();
        lines.extend(overflow.line().map(|line| Connection {
            name: None,
            to: None,
            rule: "too many requests to list".to_owned(),
            ..line
        }));
        lines.sort_by_key(|line| line.id);
        lines
    }

    fn window(&self) -> MutexGuard<'_, Option<RequestWindow>> {
        self.0.lock()
    }
}

impl Group {
    /// One line for all requests that were only counted.
    fn line(self) -> Option<Connection> {
        let mut last = self.last?;
        if self.counted > 1 {
            let detail = last.detail.unwrap_or_default();
            last.detail = Some(format!("{detail}; {} more within a second", self.counted - 1));
        }
        Some(last)
    }
}

fn key(line: &Connection) -> RequestGroupKey {
    let method = line.detail.as_deref().and_then(|detail| detail.split(' ').next());
    (method.map(str::to_owned), line.name.clone(), line.rule.clone(), line.verdict)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{IN_TOTAL, PER_GROUP, RequestLimiter};
    use crate::model::{Connection, Protocol, SessionId, Verdict, now};

    fn line(id: u64, detail: &str, verdict: Verdict) -> Connection {
        Connection {
            session: SessionId::fresh(),
            id,
            at: now(),
            ended_at: None,
            protocol: Protocol::Http,
            to: None,
            name: Some("api.example".to_owned()),
            verdict,
            rule: "allow-all".to_owned(),
            bytes_in: 0,
            bytes_out: 0,
            detail: Some(detail.to_owned()),
        }
    }

    #[test]
    fn many_that_are_alike_become_one_line() {
        let fold = RequestLimiter::default();
        let mut written = 0;
        for id in 0..1000 {
            written += fold.add(line(id, &format!("GET /{id} 200"), Verdict::Allowed)).0.len();
        }
        let (other, opens) = fold.add(line(1000, "POST / 403", Verdict::Denied));
        assert_eq!((written, other.len(), opens), (PER_GROUP, 1, false));
        let rest = fold.expire(Duration::ZERO);
        assert_eq!(rest.len(), 1);
        let wanted = format!("GET /999 200; {} more within a second", 1000 - PER_GROUP - 1);
        assert_eq!(rest[0].detail.as_ref(), Some(&wanted));
        assert!(fold.expire(Duration::ZERO).is_empty());
    }

    #[test]
    fn many_that_differ_are_bounded_too() {
        let fold = RequestLimiter::default();
        let mut written = 0;
        for id in 0..5000 {
            written += fold.add(line(id, &format!("METHOD{id} / 200"), Verdict::Allowed)).0.len();
        }
        assert_eq!(written, IN_TOTAL);
        let rest = fold.expire(Duration::ZERO);
        assert_eq!(rest.len(), 1);
        assert_eq!(rest[0].rule, "too many requests to list");
        assert!(rest[0].detail.as_ref().unwrap().contains(&format!("; {} more", 4899)));
    }
}
