//! Lines about requests, written down without letting a sandbox fill the journal.
//!
//! Requests are alike that have method, host, rule and verdict in common. Of those that are alike, the first [`ALIKE`] of a
//! second are told one by one and the others together, with their number. And no more than [`MOST`] lines are told
//! one by one in a second, of whatever kind.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::model::{Connection, Verdict};

pub(super) const WINDOW: Duration = Duration::from_secs(1);
const ALIKE: usize = 20;
const MOST: usize = 100;

type Key = (Option<String>, Option<String>, String, Verdict);

/// What was told, and what was only counted.
#[derive(Debug, Default)]
pub(super) struct Fold(Mutex<Option<Window>>);

#[derive(Debug)]
struct Window {
    opened: Instant,
    told: usize,
    alike: HashMap<Key, Alike>,
    /// Those of kinds that there was no room for.
    beyond: Alike,
}

#[derive(Debug, Default)]
struct Alike {
    told: usize,
    counted: u64,
    last: Option<Connection>,
}

impl Fold {
    /// Takes a line in, and says what is to be written now, and whether there will be more in a [`WINDOW`] from now.
    pub(super) fn add(&self, line: Connection) -> (Vec<Connection>, bool) {
        let mut lines = self.over(WINDOW);
        let mut held = self.window();
        let is_new = held.is_none();
        let window = held.get_or_insert_with(|| Window {
            opened: Instant::now(),
            told: 0,
            alike: HashMap::new(),
            beyond: Alike::default(),
        });
        let is_full = window.alike.len() >= MOST;
        let alike = match window.alike.get_mut(&key(&line)) {
            Some(alike) => alike,
            None if is_full => &mut window.beyond,
            None => window.alike.entry(key(&line)).or_default(),
        };
        if alike.told < ALIKE && window.told < MOST {
            alike.told += 1;
            window.told += 1;
            lines.push(line);
        } else {
            alike.counted += 1;
            alike.last = Some(line);
        }
        (lines, is_new)
    }

    /// What was counted in a window that was opened so long ago.
    pub(super) fn over(&self, age: Duration) -> Vec<Connection> {
        let over = self.window().take_if(|window| window.opened.elapsed() >= age);
        let Some(Window { alike, beyond, .. }) = over else { return Vec::new() };
        let mut lines: Vec<_> = alike.into_values().filter_map(Alike::line).collect();
        lines.extend(beyond.line().map(|line| Connection {
            name: None,
            to: None,
            rule: "too many requests to list".to_owned(),
            ..line
        }));
        lines.sort_by_key(|line| line.id);
        lines
    }

    fn window(&self) -> MutexGuard<'_, Option<Window>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Alike {
    /// All that were only counted, in one line.
    fn line(self) -> Option<Connection> {
        let mut last = self.last?;
        if self.counted > 1 {
            let detail = last.detail.unwrap_or_default();
            last.detail = Some(format!("{detail}; {} more within a second", self.counted - 1));
        }
        Some(last)
    }
}

fn key(line: &Connection) -> Key {
    let method = line.detail.as_deref().and_then(|detail| detail.split(' ').next());
    (method.map(str::to_owned), line.name.clone(), line.rule.clone(), line.verdict)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{ALIKE, Fold, MOST};
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
        let fold = Fold::default();
        let mut told = 0;
        for id in 0..1000 {
            told += fold.add(line(id, &format!("GET /{id} 200"), Verdict::Allowed)).0.len();
        }
        let (other, opens) = fold.add(line(1000, "POST / 403", Verdict::Denied));
        assert_eq!((told, other.len(), opens), (ALIKE, 1, false));
        let rest = fold.over(Duration::ZERO);
        assert_eq!(rest.len(), 1);
        let wanted = format!("GET /999 200; {} more within a second", 1000 - ALIKE - 1);
        assert_eq!(rest[0].detail.as_ref(), Some(&wanted));
        assert!(fold.over(Duration::ZERO).is_empty());
    }

    #[test]
    fn many_that_differ_are_bounded_too() {
        let fold = Fold::default();
        let mut told = 0;
        for id in 0..5000 {
            told += fold.add(line(id, &format!("METHOD{id} / 200"), Verdict::Allowed)).0.len();
        }
        assert_eq!(told, MOST);
        let rest = fold.over(Duration::ZERO);
        assert_eq!(rest.len(), 1);
        assert_eq!(rest[0].rule, "too many requests to list");
        assert!(rest[0].detail.as_ref().unwrap().contains(&format!("; {} more", 4899)));
    }
}
