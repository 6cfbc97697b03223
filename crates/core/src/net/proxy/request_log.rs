//! Requests on record: those in flight, and how each is written to the journal.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Uri};
use parking_lot::Mutex;

use super::super::log::OpenFlow;
use super::request::OwnedRequestAction;

/// How much of a path is logged.
const LONGEST_PATH: usize = 200;

/// How a request is logged: `GET /v1/models`.
pub(super) fn line(method: &Method, uri: &Uri) -> String {
    let path = uri.path();
    let fits = path.char_indices().nth(LONGEST_PATH).map_or(path.len(), |(at, _)| at);
    let more = if fits < path.len() { "…" } else { "" };
    format!("{method} {}{more}", &path[..fits])
}

/// One request, as it will be in the journal.
#[derive(Debug)]
pub(super) struct RequestRecord {
    pub(super) open: Arc<OpenFlow>,
    told: Mutex<RequestLine>,
}

#[derive(Debug)]
struct RequestLine {
    line: String,
    notes: Vec<String>,
}

impl RequestRecord {
    pub(super) fn new(open: Arc<OpenFlow>, line: String) -> Arc<Self> {
        open.note(line.clone());
        Arc::new(Self { open, told: Mutex::new(RequestLine { line, notes: Vec::new() }) })
    }

    /// What it was answered with.
    pub(super) fn status(&self, status: u16) {
        let mut told = self.told.lock();
        told.line = format!("{} {status}", told.line);
        self.open.note(told.text());
    }

    /// Adds what else is worth telling, once.
    pub(super) fn note(&self, note: &str) {
        let mut told = self.told.lock();
        if !told.notes.iter().any(|known| known == note) {
            told.notes.push(note.to_owned());
            self.open.note(told.text());
        }
    }

    /// The server did not answer.
    pub(super) fn failed(&self, why: &str) {
        let told = self.told.lock();
        self.open.failed(format!("{}: {why}", told.text()));
    }

    /// A rule was against it after all.
    pub(super) fn denied(&self, why: &str) {
        let told = self.told.lock();
        self.open.denied(why.to_owned(), told.text());
    }
}

impl RequestLine {
    fn text(&self) -> String {
        let mut text = self.line.clone();
        for note in &self.notes {
            text.push_str("; ");
            text.push_str(note);
        }
        text
    }
}

/// The requests of one connection that are in flight.
#[derive(Debug, Default)]
pub(super) struct InFlightRequests {
    next: AtomicU64,
    under_way: Mutex<HashMap<u64, SentRequest>>,
}

/// A request as the sandbox sent it: what rules are asked about again when they change.
#[derive(Debug, Clone)]
pub(super) struct SentRequest {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) open: Arc<OpenFlow>,
    /// The action that was taken on it.
    pub(super) action: OwnedRequestAction,
}

impl InFlightRequests {
    pub(super) fn begin(
        self: &Arc<Self>,
        parts: &Parts,
        record: Arc<RequestRecord>,
        action: &OwnedRequestAction,
    ) -> InFlightRequest {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let sent = SentRequest {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            open: Arc::clone(&record.open),
            action: action.clone(),
        };
        self.under_way.lock().insert(id, sent);
        InFlightRequest { id, flights: Arc::clone(self), record }
    }

    pub(super) fn all(&self) -> Vec<SentRequest> {
        self.under_way.lock().values().cloned().collect()
    }
}

/// A request in flight, until this is dropped.
#[derive(Debug)]
pub(super) struct InFlightRequest {
    id: u64,
    flights: Arc<InFlightRequests>,
    pub(super) record: Arc<RequestRecord>,
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.flights.under_way.lock().remove(&self.id);
    }
}
