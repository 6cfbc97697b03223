//! One task per webhook: follows the event journal from its cursor on, and sends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::sign::signature;
use super::{ActiveWebhook, REMEMBERED, WINDOW, Webhooks};
use crate::engine::error::error_chain;
use crate::engine::observe::events::{EventBatch, EventQuery, EventScope, EventStream};
use crate::engine::{Error, Result};
use crate::model::{
    EventFilter, EventId, Name, SandboxId, Timestamp, Webhook, WebhookDelivery, WebhookId, now,
    webhook_kinds,
};
use crate::net::PostTarget;
use crate::store::Durability;

/// How large a body may be.
const BODY_BYTES: usize = 64 << 10;
/// How often the cursor is written while it moves.
const SAVE_EVERY: Duration = Duration::from_millis(200);
/// How often it is written where nothing matches.
const SAVE_IDLE_EVERY: Duration = Duration::from_secs(60);
/// How long after the journal could not be read it is read again.
const READ_AGAIN: Duration = Duration::from_secs(10);
/// How much of an error is remembered.
const ERROR_TEXT: usize = 300;
/// How long a test waits for its turn among the deliveries of its project.
const TEST_WITHIN: Duration = Duration::from_secs(5);

/// An event as it is sent.
#[derive(Debug, Clone)]
struct OutgoingEvent {
    id: EventId,
    kind: String,
    body: Bytes,
}

/// The events of one sandbox, or of none, in order.
#[derive(Debug, Default)]
struct DeliveryLane {
    queue: VecDeque<OutgoingEvent>,
    /// How often the first of them was tried.
    attempts: u32,
    /// When it is tried again.
    not_before: Option<Instant>,
    busy: bool,
}

type DeliveryLaneKey = Option<SandboxId>;

/// How an attempt ended.
#[derive(Debug)]
struct AttemptOutcome {
    lane: DeliveryLaneKey,
    result: std::result::Result<u16, FailedAttempt>,
    at: Timestamp,
    took: Duration,
}

#[derive(Debug)]
struct FailedAttempt {
    status: Option<u16>,
    error: String,
    /// How long the receiver wants to be left alone.
    retry_after: Option<Duration>,
}

/// What a webhook's task knows.
struct Delivering {
    hook: Arc<ActiveWebhook>,
    target: PostTarget,
    stream: EventStream,
    lanes: BTreeMap<DeliveryLaneKey, DeliveryLane>,
    /// Read, and in no lane yet.
    backlog: VecDeque<(DeliveryLaneKey, OutgoingEvent)>,
    /// In a lane, and not delivered.
    queued: BTreeSet<EventId>,
    dirty: bool,
}

/// Delivers until the webhook is changed, or the daemon goes down.
pub(super) async fn run(this: Weak<Webhooks>, hook: Arc<ActiveWebhook>) {
    let id = hook.webhook.id.clone();
    loop {
        let Some(webhooks) = this.upgrade() else { return };
        let outcome = match Delivering::open(&webhooks, &hook) {
            Ok(delivering) => {
                drop(webhooks);
                delivering.run(&this).await
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(None) => return,
            Ok(Some(reason)) => {
                if let Some(webhooks) = this.upgrade() {
                    // In a task of its own: disabling ends this one.
                    let of = Arc::clone(&webhooks);
                    webhooks.context.tasks.spawn(async move { of.disable(&hook, reason).await });
                }
                return;
            }
            Err(error) => {
                tracing::error!(webhook = %id, error = error_chain(&error), "a webhook cannot deliver; it is tried again");
                tokio::time::sleep(READ_AGAIN).await;
            }
        }
    }
}

impl Delivering {
    fn open(webhooks: &Arc<Webhooks>, hook: &Arc<ActiveWebhook>) -> Result<Self> {
        let webhook = &hook.webhook;
        let target =
            PostTarget::parse(&webhook.url).map_err(|reason| Error::invalid("url", reason))?;
        // A kind of a later version matches nothing here.
        let kinds = webhook_kinds(&webhook.events).unwrap_or_else(|_| webhook.events.clone());
        let newest = EventId::at(Timestamp::now());
        let after = hook.cursor.lock().after.min(newest);
        let query = EventQuery {
            scope: EventScope::Project(webhook.project.clone()),
            filter: EventFilter { kinds, ..EventFilter::default() },
            after: Some(after),
            since: None,
            follow: true,
        };
        let context = &webhooks.context;
        let stream = EventStream::open(&context.events, context.tasks.shutdown(), query)?;
        Ok(Self {
            hook: Arc::clone(hook),
            target,
            stream,
            lanes: BTreeMap::new(),
            backlog: VecDeque::new(),
            queued: BTreeSet::new(),
            dirty: false,
        })
    }

    /// Delivers. `Some` is the reason to disable the webhook.
    async fn run(mut self, this: &Weak<Webhooks>) -> Result<Option<String>> {
        let mut under_way = JoinSet::new();
        let (mut save, mut idle) =
            (tokio::time::interval(SAVE_EVERY), tokio::time::interval(SAVE_IDLE_EVERY));
        loop {
            self.fill();
            let Some(due) = self.start(this, &mut under_way) else { return Ok(None) };
            let has_room = self.backlog.is_empty() && self.queued.len() < WINDOW;
            tokio::select! {
                batch = self.stream.next(), if has_room => match batch? {
                    Some(batch) => {
                        let Some(webhooks) = this.upgrade() else { return Ok(None) };
                        self.take(&webhooks, batch);
                    }
                    // The daemon goes down.
                    None => return Ok(None),
                },
                Some(ended) = under_way.join_next(), if !under_way.is_empty() => {
                    let Ok(ended) = ended else { continue };
                    let Some(webhooks) = this.upgrade() else { return Ok(None) };
                    if let Some(reason) = self.attempted(&webhooks, ended) {
                        self.save(this).await;
                        return Ok(Some(reason));
                    }
                }
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                _ = save.tick(), if self.dirty => self.save(this).await,
                _ = idle.tick() => self.advance(),
            }
        }
    }

    /// Takes what was read.
    fn take(&mut self, webhooks: &Webhooks, batch: EventBatch) {
        if batch.missed {
            let first = batch.events.first().map_or(batch.cursor.0, |event| event.id.0 - 1);
            let missed = sandkeep_types::Event {
                id: first.to_string(),
                at: now().to_string(),
                kind: "stream.missed".to_owned(),
                project: Some(self.hook.webhook.project.to_string()),
                sandbox: None,
                data: Default::default(),
            };
            self.backlog.push_back((None, outgoing(EventId(first), &missed)));
        }
        let done: BTreeSet<EventId> = self.hook.cursor.lock().done.iter().copied().collect();
        for event in batch.events.into_iter().filter(|event| !done.contains(&event.id)) {
            let lane = event.sandbox.as_ref().map(|sandbox| sandbox.id.clone());
            let id = event.id;
            let link = webhooks.link_in(&self.hook.webhook, &event.change);
            let mut event: sandkeep_types::Event = event.into();
            event.data.extend(link.map(|link| ("answer_url".to_owned(), link.into())));
            self.backlog.push_back((lane, outgoing(id, &event)));
        }
        self.advance();
    }

    /// Puts what was read into lanes, as far as there is room.
    fn fill(&mut self) {
        while self.queued.len() < WINDOW
            && let Some((lane, event)) = self.backlog.pop_front()
        {
            self.queued.insert(event.id);
            self.lanes.entry(lane).or_default().queue.push_back(event);
        }
    }

    /// Starts what is due. Answers with when the next is; nothing if the daemon goes down.
    fn start(
        &mut self,
        this: &Weak<Webhooks>,
        under_way: &mut JoinSet<AttemptOutcome>,
    ) -> Option<Option<Instant>> {
        let (now, mut next) = (Instant::now(), None::<Instant>);
        for (key, lane) in &mut self.lanes {
            let Some(event) = lane.queue.front().filter(|_| !lane.busy) else { continue };
            if let Some(at) = lane.not_before.filter(|at| *at > now) {
                next = Some(next.map_or(at, |before| before.min(at)));
                continue;
            }
            let webhooks = this.upgrade()?;
            lane.busy = true;
            let (hook, target) = (Arc::clone(&self.hook), self.target.clone());
            let (key, event) = (key.clone(), event.clone());
            under_way.spawn(async move {
                let room = webhooks.room(&hook.webhook.project);
                let _permit = room.acquire().await;
                let (at, begun) = (crate::model::now(), Instant::now());
                let result = webhooks.send(&hook.webhook, &target, &event).await;
                AttemptOutcome { lane: key, result, at, took: begun.elapsed() }
            });
        }
        Some(next)
    }

    /// Applies the outcome of an attempt. `Some` is the reason to disable the webhook.
    fn attempted(&mut self, webhooks: &Webhooks, ended: AttemptOutcome) -> Option<String> {
        let settings = &webhooks.context.settings.webhooks;
        let AttemptOutcome { lane: key, result, at, took } = ended;
        let lane = self.lanes.get_mut(&key)?;
        lane.busy = false;
        lane.attempts += 1;
        let event = lane.queue.front()?.clone();
        let (status, error) = match &result {
            Ok(status) => (Some(*status), None),
            Err(failed) => (failed.status, Some(failed.error.clone())),
        };
        remember(&self.hook, delivery(&event, at, lane.attempts, status, error, took));
        self.dirty = true;
        match result {
            Ok(_) => {
                lane.queue.pop_front();
                (lane.attempts, lane.not_before) = (0, None);
                if lane.queue.is_empty() {
                    self.lanes.remove(&key);
                }
                self.queued.remove(&event.id);
                let is_failing = self.lanes.values().any(|lane| lane.attempts > 0);
                let mut cursor = self.hook.cursor.lock();
                cursor.done.push(event.id);
                if !is_failing {
                    cursor.failing_since = None;
                }
                drop(cursor);
                self.advance();
                None
            }
            Err(failed) => {
                let pause = pause(settings.retry, settings.retry_at_latest, lane.attempts);
                let asked = failed.retry_after.unwrap_or_default().min(settings.retry_at_latest);
                lane.not_before = Some(Instant::now() + pause.max(asked));
                let since = *self.hook.cursor.lock().failing_since.get_or_insert(at);
                let failing = now().duration_since(since);
                if failed.status == Some(410) {
                    return Some("the receiver answered 410: it is gone for good".to_owned());
                }
                let limit = i64::try_from(settings.give_up.as_millis()).unwrap_or(i64::MAX);
                (failing >= jiff::SignedDuration::from_millis(limit)).then(|| {
                    format!("deliveries have failed since {since}; the last one: {}", failed.error)
                })
            }
        }
    }

    /// Moves the cursor to where everything before was delivered.
    fn advance(&mut self) {
        let first = self.queued.first().copied();
        let waiting = self.backlog.front().map(|(_, event)| event.id);
        let undelivered = first.into_iter().chain(waiting).min();
        let after = match undelivered {
            Some(id) => EventId(id.0.saturating_sub(1)),
            None => self.stream.cursor(),
        };
        let mut cursor = self.hook.cursor.lock();
        if after > cursor.after {
            cursor.after = after;
            self.dirty = true;
        }
        let after = cursor.after;
        cursor.done.retain(|id| *id > after);
    }

    async fn save(&mut self, this: &Weak<Webhooks>) {
        let Some(webhooks) = this.upgrade() else { return };
        let cursor = self.hook.cursor.lock().clone();
        match webhooks.context.store.write(&cursor, Durability::Soon).await {
            Ok(()) => self.dirty = false,
            // The next daemon delivers the same events again, if the writes keep failing.
            Err(error) => {
                tracing::warn!(webhook = %cursor.webhook, %error, "how far a webhook has come was not recorded");
            }
        }
    }
}

impl Webhooks {
    /// Sends an event that says that it is a test, at once and once.
    pub(in crate::engine) async fn test(
        &self,
        project: &Name,
        id: &WebhookId,
    ) -> Result<WebhookDelivery> {
        let hook = self.find(project, id)?;
        let target = PostTarget::parse(&hook.webhook.url);
        let target = target.map_err(|reason| Error::invalid("url", reason))?;
        let data = serde_json::json!({ "webhook": id.as_str() });
        let event_id = EventId::at(Timestamp::now());
        let event = sandkeep_types::Event {
            id: event_id.0.to_string(),
            at: now().to_string(),
            kind: "webhook.test".to_owned(),
            project: Some(project.to_string()),
            sandbox: None,
            data: data.as_object().cloned().unwrap_or_default(),
        };
        let event = outgoing(event_id, &event);
        let room = self.room(project);
        let turn = tokio::time::timeout(TEST_WITHIN, room.acquire()).await;
        let _permit = turn.map_err(|_| Error::TooManyDeliveries(project.clone()))?;
        let (at, begun) = (now(), Instant::now());
        let result = self.send(&hook.webhook, &target, &event).await;
        let (status, error) = match result {
            Ok(status) => (Some(status), None),
            Err(failed) => (failed.status, Some(failed.error)),
        };
        let delivery = delivery(&event, at, 1, status, error, begun.elapsed());
        remember(&hook, delivery.clone());
        Ok(delivery)
    }

    async fn send(
        &self,
        webhook: &Webhook,
        target: &PostTarget,
        event: &OutgoingEvent,
    ) -> std::result::Result<u16, FailedAttempt> {
        let local = |error: String| FailedAttempt { status: None, error, retry_after: None };
        let secrets = self.secrets(webhook).map_err(|error| local(error_chain(&error)))?;
        let timestamp = now().as_second();
        let signed = signature(&secrets, timestamp, &event.body);
        let mut headers = HeaderMap::new();
        let agent = concat!("sandkeep-webhooks/", env!("CARGO_PKG_VERSION"));
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in [
            ("sandkeep-event", event.kind.clone()),
            ("sandkeep-delivery", format!("{}/{}", webhook.id, event.id)),
            ("sandkeep-timestamp", timestamp.to_string()),
            ("sandkeep-signature", signed),
        ] {
            let value = HeaderValue::try_from(value).map_err(|error| local(error.to_string()))?;
            headers.insert(HeaderName::from_static(name), value);
        }
        let within = self.context.settings.webhooks.timeout;
        let (body, allow) = (event.body.clone(), webhook.allow_private);
        match self.outside.post(target, headers, body, allow, within).await {
            Ok((status @ 200..=299, _)) => Ok(status),
            Ok((status, headers)) => {
                let asked = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let error = match status {
                    300..=399 => format!("answered {status}: redirects are not followed"),
                    _ => format!("answered {status}"),
                };
                let seconds = asked.and_then(|text| text.trim().parse::<u64>().ok());
                let retry_after = seconds.map(|seconds| Duration::from_secs(seconds.min(86_400)));
                Err(FailedAttempt { status: Some(status), error, retry_after })
            }
            Err(error) => Err(local(error.to_string())),
        }
    }
}

fn outgoing(id: EventId, event: &sandkeep_types::Event) -> OutgoingEvent {
    let mut body = serde_json::to_vec(event).unwrap_or_default();
    if body.len() > BODY_BYTES {
        let data = serde_json::json!({ "truncated": true });
        let data = data.as_object().cloned().unwrap_or_default();
        body = serde_json::to_vec(&sandkeep_types::Event { data, ..event.clone() })
            .unwrap_or_default();
    }
    OutgoingEvent { id, kind: event.kind.clone(), body: body.into() }
}

fn delivery(
    event: &OutgoingEvent,
    at: Timestamp,
    attempt: u32,
    status: Option<u16>,
    error: Option<String>,
    took: Duration,
) -> WebhookDelivery {
    let error = error.map(|error| error.chars().take(ERROR_TEXT).collect());
    let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    WebhookDelivery {
        event: event.id,
        kind: event.kind.clone(),
        at,
        attempt,
        status,
        error,
        duration_ms,
    }
}

fn remember(hook: &ActiveWebhook, delivery: WebhookDelivery) {
    let mut cursor = hook.cursor.lock();
    let old = (cursor.deliveries.len() + 1).saturating_sub(REMEMBERED);
    cursor.deliveries.drain(..old);
    cursor.deliveries.push(delivery);
}

/// How long after a failure it is tried again: twice as long every time, and not at the same moment as all others.
fn pause(first: Duration, longest: Duration, attempts: u32) -> Duration {
    let full = first.saturating_mul(2u32.saturating_pow(attempts.saturating_sub(1))).min(longest);
    let mut random = [0u8; 1];
    // Without random bytes there is no jitter, and nothing else is wrong.
    let _ = getrandom::fill(&mut random);
    full.mul_f64(0.5 + f64::from(random[0]) / 510.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{BODY_BYTES, outgoing, pause};
    use crate::model::EventId;

    #[test]
    fn pauses_grow_and_are_bounded() {
        let (first, longest) = (Duration::from_secs(2), Duration::from_secs(3600));
        for (attempts, full) in [(1, 2), (2, 4), (3, 8), (11, 2048), (12, 3600), (u32::MAX, 3600)] {
            for _ in 0..50 {
                let pause = pause(first, longest, attempts).as_secs_f64();
                let full = f64::from(full);
                assert!((full * 0.49..=full * 1.01).contains(&pause), "{attempts}: {pause}");
            }
        }
    }

    #[test]
    fn bodies_are_bounded() {
        let mut event = sandkeep_types::Event {
            id: "7".to_owned(),
            at: String::new(),
            kind: "guard.found".to_owned(),
            project: None,
            sandbox: None,
            data: Default::default(),
        };
        event.data.insert("text".to_owned(), "x".repeat(BODY_BYTES).into());
        let sent = outgoing(EventId(7), &event);
        assert!(sent.body.len() < 1000, "{}", sent.body.len());
        let body: sandkeep_types::Event = serde_json::from_slice(&sent.body).unwrap();
        assert_eq!((body.kind.as_str(), &body.data["truncated"]), ("guard.found", &true.into()));
    }
}
