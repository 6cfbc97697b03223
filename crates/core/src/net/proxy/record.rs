//! Requests on record: those under way, and how each is told in the journal.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Uri};

use super::super::ledger::Open;
use super::request::Way;

/// How much of a path is told.
const LONGEST_PATH: usize = 200;

/// How a request is told: `GET /v1/models`.
pub(super) fn line(method: &Method, uri: &Uri) -> String {
    let path = uri.path();
    let fits = path.char_indices().nth(LONGEST_PATH).map_or(path.len(), |(at, _)| at);
    let more = if fits < path.len() { "…" } else { "" };
    format!("{method} {}{more}", &path[..fits])
}

/// One request, as the journal will tell it.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) open: Arc<Open>,
    told: Mutex<Told>,
}

#[derive(Debug)]
struct Told {
    line: String,
    notes: Vec<String>,
}

impl Record {
    pub(super) fn new(open: Arc<Open>, line: String) -> Arc<Self> {
        open.note(line.clone());
        Arc::new(Self { open, told: Mutex::new(Told { line, notes: Vec::new() }) })
    }

    /// What it was answered with.
    pub(super) fn status(&self, status: u16) {
        let mut told = lock(&self.told);
        told.line = format!("{} {status}", told.line);
        self.open.note(told.text());
    }

    /// Adds what else is worth telling, once.
    pub(super) fn note(&self, note: &str) {
        let mut told = lock(&self.told);
        if !told.notes.iter().any(|known| known == note) {
            told.notes.push(note.to_owned());
            self.open.note(told.text());
        }
    }

    /// Nobody answered.
    pub(super) fn failed(&self, why: &str) {
        let told = lock(&self.told);
        self.open.failed(format!("{}: {why}", told.text()));
    }

    /// A rule was against it after all.
    pub(super) fn denied(&self, why: &str) {
        let told = lock(&self.told);
        self.open.denied(why.to_owned(), told.text());
    }
}

impl Told {
    fn text(&self) -> String {
        let mut text = self.line.clone();
        for note in &self.notes {
            text.push_str("; ");
            text.push_str(note);
        }
        text
    }
}

/// The requests of one connection that are under way.
#[derive(Debug, Default)]
pub(super) struct Flights {
    next: AtomicU64,
    under_way: Mutex<HashMap<u64, Sent>>,
}

/// A request as the sandbox sent it: what rules are asked about again when they change.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) open: Arc<Open>,
    /// What became of it.
    pub(super) went: Way,
}

impl Flights {
    pub(super) fn begin(
        self: &Arc<Self>,
        parts: &Parts,
        record: Arc<Record>,
        went: &Way,
    ) -> Flight {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let sent = Sent {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            open: Arc::clone(&record.open),
            went: went.clone(),
        };
        lock(&self.under_way).insert(id, sent);
        Flight { id, flights: Arc::clone(self), record }
    }

    pub(super) fn all(&self) -> Vec<Sent> {
        lock(&self.under_way).values().cloned().collect()
    }
}

/// A request under way, until this is dropped.
#[derive(Debug)]
pub(super) struct Flight {
    id: u64,
    flights: Arc<Flights>,
    pub(super) record: Arc<Record>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        lock(&self.flights.under_way).remove(&self.id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
