//! One HTTP request: judged by the rules, sent, answered.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, UPGRADE};
use hyper::http::request;
use hyper::rt::Executor as _;
use hyper::upgrade::OnUpgrade;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use zeroize::Zeroizing;

use super::super::log::FlowInfo;
use super::super::rules::{RequestAction, Rules};
use super::super::special_addresses::{self, Destination};
use super::answer::{answered, full, reply, wants_json};
use super::body::{CountedBody, ReplacedBody};
use super::head::{self, Target};
use super::replace::Replacements;
use super::request_log::{InFlightRequest, InFlightRequests, RequestRecord, line};
use super::secrets::{self, RequestSecrets};
use super::tunnel;
use super::upstream_connection::{
    Body, Broken, ConnectionTasks, Dialler, HttpVersion, Reach, Room, explain,
};
use super::{Intercept, Timeouts};
use crate::model::{Answer, Protocol};

/// Up to this length a body whose length changes is read whole, so that its new length can be sent.
const LARGEST_READ: u64 = 1 << 20;

/// What the requests of one connection share.
pub(super) struct ProxyConnection {
    pub(super) intercept: Intercept,
    /// Whether the sandbox speaks HTTP/2.
    is_http2: bool,
    /// Whether the other side does, once somebody had to know.
    outside_is_http2: OnceCell<bool>,
    patience: Timeouts,
    dialler: Dialler,
    http1: Client<Dialler, Body>,
    http2: Client<Dialler, Body>,
    /// What is forwarded never shares a connection with what is not.
    forward: Client<Dialler, Body>,
    forward_http1: Client<Dialler, Body>,
    /// For credentials in the clear.
    forward_inside: Client<Dialler, Body>,
    pub(super) flights: Arc<InFlightRequests>,
    /// Connections that speak something else than HTTP by now.
    pub(super) tunnels: ConnectionTasks,
    /// What is taken out of answers: all that the hosts of its requests may have been sent. Grows
    /// with the number of secrets, not of requests.
    masks: Mutex<Replacements>,
}

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OwnedRequestAction {
    Deny,
    Answer(Answer),
    Pass,
    Forward { url: String, prefix: Option<String> },
}

struct JudgedRequest {
    rule: String,
    action: OwnedRequestAction,
    set: Vec<(HeaderName, Zeroizing<String>)>,
}

impl ProxyConnection {
    pub(super) fn new(
        intercept: Intercept,
        is_http2: bool,
        patience: Timeouts,
        tasks: &ConnectionTasks,
    ) -> Self {
        let own = (intercept.tls, intercept.name.clone(), intercept.to.asked.port());
        let Intercept { upstream, rules, open, to, .. } = &intercept;
        let room = Room {
            connections: Arc::clone(&intercept.authority.outward),
            sockets: intercept.authority.sockets.clone(),
            within: patience.outward,
        };
        let dialler = Dialler::new(upstream, rules, own, *to, open, room);
        let forwarder = dialler.reaching(Reach::Host);
        Self {
            is_http2,
            outside_is_http2: OnceCell::new(),
            patience,
            http1: dialler.client(HttpVersion::Http1, tasks),
            http2: dialler.client(HttpVersion::Http2, tasks),
            forward: forwarder.client(HttpVersion::Any, tasks),
            forward_http1: forwarder.client(HttpVersion::Http1, tasks),
            forward_inside: dialler.reaching(Reach::Inside).client(HttpVersion::Http1, tasks),
            dialler,
            intercept,
            flights: Arc::default(),
            tunnels: ConnectionTasks::default(),
            masks: Mutex::default(),
        }
    }

    /// Cuts requests in flight that the rules now in force have another word about.
    pub(super) fn judge_again(&self) {
        let rules = self.rules();
        for sent in self.flights.all() {
            let judged = self.judge(&rules, &sent.method, &sent.uri, &sent.headers);
            let against = if judged.action == sent.action {
                self.against(&rules, &judged.action)
            } else {
                Some(judged.rule)
            };
            against.into_iter().for_each(|rule| sent.open.cut(rule));
        }
    }

    /// The rule against where requests were forwarded to, if there is one now.
    fn against(&self, rules: &Rules, action: &OwnedRequestAction) -> Option<String> {
        let OwnedRequestAction::Forward { url, .. } = action else { return None };
        let host = url.parse::<Uri>().ok()?.host()?.to_ascii_lowercase();
        self.dialler.against(rules, &host)
    }

    /// What a request goes out by.
    async fn client(
        &self,
        action: &OwnedRequestAction,
        upgrade: bool,
        inside: bool,
    ) -> io::Result<&Client<Dialler, Body>> {
        if let OwnedRequestAction::Forward { .. } = action {
            return Ok(match (inside, upgrade) {
                (true, _) => &self.forward_inside,
                (false, true) => &self.forward_http1,
                (false, false) => &self.forward,
            });
        }
        if upgrade {
            return Ok(&self.http1);
        }
        // Without TLS there is no negotiation: the other side gets the version that the sandbox
        // speaks.
        let is_http2 = if self.intercept.tls {
            *self.outside_is_http2.get_or_try_init(|| self.dialler.probe()).await?
        } else {
            self.is_http2
        };
        Ok(if is_http2 { &self.http2 } else { &self.http1 })
    }

    /// Sends a request.
    async fn send(
        &self,
        action: &OwnedRequestAction,
        upgrade: Option<&HeaderValue>,
        PreparedRequest { mut request, inside, .. }: PreparedRequest,
    ) -> Result<Response<Incoming>, ProxyError> {
        if let Some(protocol) = upgrade {
            request.headers_mut().insert(UPGRADE, protocol.clone());
            request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        }
        let lost = |error: &(dyn Error + 'static)| {
            let (why, refused) = explain(error);
            ProxyError::Upstream { why, refused }
        };
        let client = self.client(action, upgrade.is_some(), inside).await.map_err(|e| lost(&e))?;
        client.request(request).await.map_err(|error| lost(&error))
    }

    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.intercept.rules.borrow())
    }

    fn judge(
        &self,
        rules: &Rules,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> JudgedRequest {
        let Intercept { name, to, tls, .. } = &self.intercept;
        let verdict = rules.request(name, *to, method, uri, headers);
        let action = match verdict.action {
            RequestAction::Deny => OwnedRequestAction::Deny,
            RequestAction::Pass => OwnedRequestAction::Pass,
            RequestAction::Answer(answer) => OwnedRequestAction::Answer(answer.clone()),
            RequestAction::Forward { url, prefix } => {
                let target = Target::own(*tls, name, to.asked.port(), uri).forwarded(url);
                // The bound also decides about what its own rule did not send there.
                if let Some(target) = target.filter(|_| !verdict.by_bound)
                    && let Some(uri) = target.uri()
                    && let Err(rule) =
                        rules.forwarded(&target.host, target.port, method, &uri, headers)
                {
                    return JudgedRequest {
                        rule,
                        action: OwnedRequestAction::Deny,
                        set: Vec::new(),
                    };
                }
                OwnedRequestAction::Forward {
                    url: url.to_owned(),
                    prefix: prefix.map(str::to_owned),
                }
            }
        };
        let set = verdict.set.into_iter().map(|(name, value)| (name.clone(), value.clone()));
        JudgedRequest { rule: verdict.rule, action, set: set.collect() }
    }

    fn info(&self, rule: String) -> FlowInfo {
        FlowInfo {
            protocol: Protocol::Http,
            to: Some(self.intercept.to.asked),
            name: Some(self.intercept.name.clone()),
            rule,
        }
    }

    fn refuse(&self, parts: &request::Parts, status: StatusCode, rule: String) -> Response<Body> {
        let text = format!("Sandkeep refused this request: {rule}.");
        let detail = format!("{} {}", line(&parts.method, &parts.uri), status.as_u16());
        self.intercept.log.refused(self.info(rule), Some(detail));
        reply(status, text, wants_json(&parts.headers))
    }
}

/// Answers a request; whatever happens, there is an answer.
pub(super) async fn handle(
    proxy: Arc<ProxyConnection>,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let asked = hyper::upgrade::on(&mut request);
    let (parts, body) = request.into_parts();
    let port = proxy.intercept.to.asked.port();
    if let Err(unfit) = head::check(&parts, &proxy.intercept.name, port) {
        return Ok(proxy.refuse(&parts, unfit.status, unfit.why));
    }
    let rules = proxy.rules();
    let judged = proxy.judge(&rules, &parts.method, &parts.uri, &parts.headers);
    if let OwnedRequestAction::Deny = judged.action {
        return Ok(proxy.refuse(&parts, StatusCode::FORBIDDEN, judged.rule));
    }
    if let Some(rule) = proxy.against(&rules, &judged.action) {
        return Ok(proxy.refuse(&parts, StatusCode::FORBIDDEN, rule));
    }
    let open = proxy.intercept.log.begin(proxy.info(judged.rule.clone()));
    let record = RequestRecord::new(open, line(&parts.method, &parts.uri));
    if let OwnedRequestAction::Answer(answer) = &judged.action {
        record.status(answer.status);
        return Ok(answered(answer));
    }
    let flight = proxy.flights.begin(&parts, record, &judged.action);
    // They may have changed before it was listed, and it would not have been checked again.
    if !Arc::ptr_eq(&rules, &proxy.rules()) {
        proxy.judge_again();
    }
    Ok(pass(&proxy, &rules, judged, parts, body, asked, flight).await)
}

async fn pass(
    proxy: &ProxyConnection,
    rules: &Rules,
    judged: JudgedRequest,
    mut parts: request::Parts,
    body: Incoming,
    asked: OnUpgrade,
    flight: InFlightRequest,
) -> Response<Body> {
    let json = wants_json(&parts.headers);
    let upgrade = head::upgrade(&parts);
    let record = Arc::clone(&flight.record);
    head::strip_request(&mut parts);
    let Some(target) = aim(proxy, &judged.action, &mut parts) else {
        record.failed("the rule forwards to no URL");
        return reply(StatusCode::BAD_GATEWAY, "Sandkeep cannot forward this request.", json);
    };
    let going = async {
        let prepared = prepare(proxy, rules, &judged, target, parts, body, &record).await?;
        let masks = prepared.masks.clone();
        let answer = proxy.send(&judged.action, upgrade.as_ref(), prepared).await?;
        Ok::<_, ProxyError>((answer, masks))
    };
    let gone = tokio::select! {
        // What is cut already is not sent.
        biased;
        () = record.open.is_cut() => {
            return reply(StatusCode::FORBIDDEN, "Sandkeep cut this request: the policy changed.", json);
        }
        gone = going => gone,
    };
    match gone {
        Ok((answer, masks)) if answer.status() == StatusCode::SWITCHING_PROTOCOLS => {
            match upgrade {
                Some(_) => tunnel(proxy, answer, asked, flight, &masks),
                None => {
                    record.failed("it was answered with a protocol that nobody asked for");
                    reply(StatusCode::BAD_GATEWAY, "The server switched protocols unasked.", json)
                }
            }
        }
        Ok((answer, masks)) => {
            record.status(answer.status().as_u16());
            carry(answer, flight, &masks, json)
        }
        Err(lost) => lost.told(&record, json),
    }
}

/// Why a request was not answered.
enum ProxyError {
    /// The sandbox did not send all of its body.
    Early,
    /// Not soon enough.
    Late,
    /// It could not be forwarded; `refused` if a rule was against it.
    Upstream { why: String, refused: bool },
}

impl ProxyError {
    fn told(self, record: &RequestRecord, json: bool) -> Response<Body> {
        let (why, refused) = match self {
            Self::Early => {
                record.failed("its body ended early");
                return reply(StatusCode::BAD_REQUEST, "The body ended early.", json);
            }
            Self::Late => {
                record.failed("its body did not come");
                return reply(StatusCode::REQUEST_TIMEOUT, "The body did not come.", json);
            }
            Self::Upstream { why, refused } => (why, refused),
        };
        let status = if refused {
            record.denied(&why);
            StatusCode::FORBIDDEN
        } else {
            record.failed(&why);
            StatusCode::BAD_GATEWAY
        };
        reply(status, format!("Sandkeep could not pass this request on: {why}."), json)
    }
}

/// Where a request goes, and the headers about where it was going.
fn aim(
    proxy: &ProxyConnection,
    action: &OwnedRequestAction,
    parts: &mut request::Parts,
) -> Option<Target> {
    let Intercept { tls, name, to, .. } = &proxy.intercept;
    let own = Target::own(*tls, name, to.asked.port(), &parts.uri);
    match action {
        OwnedRequestAction::Forward { url, prefix } => {
            own.tell(&mut parts.headers, prefix.as_deref());
            own.forwarded(url)
        }
        _ => Some(own),
    }
}

/// A request as it goes out.
struct PreparedRequest {
    request: Request<Body>,
    /// Whether it may go to addresses inside only.
    inside: bool,
    /// What is taken out of its answer.
    masks: Replacements,
}

async fn prepare(
    proxy: &ProxyConnection,
    rules: &Rules,
    judged: &JudgedRequest,
    mut target: Target,
    mut parts: request::Parts,
    body: Incoming,
    record: &Arc<RequestRecord>,
) -> Result<PreparedRequest, ProxyError> {
    let gives = !judged.set.is_empty() || rules.brokered(&target.host).next().is_some();
    let trusted = gives && is_trusted(proxy, &judged.action, &target).await;
    let secrets = allotted(rules, &target.host, trusted);
    approved(proxy, &secrets, &parts, &target, !body.is_end_stream()).await?;
    let put = secrets.put(&mut parts.headers, &mut target.query);
    put.notes.iter().for_each(|note| record.note(note));
    put.used.iter().for_each(|secret| record.open.secret_used(secret, &target.host));
    let mut masks = put.masks;
    masks.extend(&told(rules, &proxy.intercept.name, &target.host));
    for (name, value) in &judged.set {
        let Ok(mut text) = HeaderValue::from_str(value) else { continue };
        if !trusted {
            record.note("headers not set: this is not TLS");
            continue;
        }
        text.set_sensitive(true);
        parts.headers.insert(name, text);
        masks.extend(&secrets::hides(name, value));
    }
    let swap = secrets.in_body(&parts.headers);
    let watched = secrets.watched(&parts.headers);
    let has_body = !body.is_end_stream();
    let mut body = body.map_err(Broken::from).boxed_unsync();
    if has_body && !(swap.is_empty() && watched.is_empty()) {
        body = ReplacedBody::new(body, &swap).watching(&watched, record).boxed_unsync();
        if !swap.keeps_length() {
            body = remeasured(proxy, &mut parts.headers, body).await?;
        }
    }
    let mut masks = {
        let mut all = proxy.masks.lock();
        all.extend(&masks);
        all.clone()
    };
    masks.extend(&put.once);
    if !masks.is_empty() {
        secrets::ask_for_plain(&mut parts.headers);
    }
    let lost = || ProxyError::Upstream { why: "its target is no URL".to_owned(), refused: false };
    let mut request = Request::new(body);
    *request.method_mut() = parts.method;
    *request.uri_mut() = target.uri().ok_or_else(lost)?;
    *request.headers_mut() = parts.headers;
    Ok(PreparedRequest { request, inside: trusted && !target.secure, masks })
}

/// Holds a request that uses secrets whose first use at this host somebody has to approve.
async fn approved(
    proxy: &ProxyConnection,
    secrets: &RequestSecrets,
    parts: &request::Parts,
    target: &Target,
    has_body: bool,
) -> Result<(), ProxyError> {
    let gate = &proxy.intercept.gate;
    let used = secrets.used(&parts.headers, target.query.as_ref(), has_body);
    for secret in used.iter().filter(|secret| gate.holds_secret(secret)) {
        let refused = |why: String| ProxyError::Upstream {
            why: format!("the use of {secret} was not approved: {why}"),
            refused: true,
        };
        // What is answered is not held, however many are.
        if let Some(known) = gate.known_secret(secret, &target.host) {
            known.map_err(refused)?;
            continue;
        }
        let Ok(_held) = proxy.intercept.held.try_acquire() else {
            return Err(refused("too many requests of this sandbox wait for an approval".into()));
        };
        gate.secret(secret, &target.host).await.map_err(refused)?;
    }
    Ok(())
}

/// What takes out of an answer all that its host may have been sent: by this request or another
/// one, on this connection or another one, with TLS or without.
fn told(rules: &Rules, name: &str, host: &str) -> Replacements {
    let mut masks = Replacements::default();
    rules.brokered(host).for_each(|secret| masks.extend(&secrets::masks(secret)));
    // Those of a forwarded request may be set by a rule for either.
    for (header, value) in rules.set_headers(name).chain(rules.set_headers(host)) {
        masks.extend(&secrets::hides(header, value));
    }
    masks
}

/// Whether credentials may go this way. TLS proves the server's identity. In the clear it could be
/// anybody: a sandbox may dial any address and call it by the name that is trusted. So the name
/// server must have given out that address, and it must be near.
async fn is_trusted(proxy: &ProxyConnection, action: &OwnedRequestAction, target: &Target) -> bool {
    let Intercept { tls, given, to, upstream, .. } = &proxy.intercept;
    let is_inside =
        |destination: &Destination| special_addresses::inside(destination.real.ip()).is_some();
    match action {
        OwnedRequestAction::Forward { .. } if target.secure => true,
        // Its rule's owner wrote down where it goes; the dialler holds it to what is found here.
        OwnedRequestAction::Forward { .. } => {
            let places = upstream.places(&target.host, target.port).await.unwrap_or_default();
            !places.is_empty() && places.iter().all(is_inside)
        }
        _ => *tls || (*given && is_inside(to)),
    }
}

fn allotted(rules: &Rules, host: &str, trusted: bool) -> RequestSecrets {
    let given: Vec<_> = rules.brokered(host).cloned().collect();
    let withheld = rules.withheld(host).cloned();
    if trusted {
        RequestSecrets { given, withheld: withheld.collect() }
    } else {
        RequestSecrets { given: Vec::new(), withheld: withheld.chain(given).collect() }
    }
}

/// A body whose length changes: read whole if it is short, or else sent without telling its length.
async fn remeasured(
    proxy: &ProxyConnection,
    headers: &mut HeaderMap,
    body: Body,
) -> Result<Body, ProxyError> {
    let Some(length) = headers.remove(CONTENT_LENGTH) else { return Ok(body) };
    let length = length.to_str().ok().and_then(|text| text.parse::<u64>().ok());
    let short = length.is_some_and(|length| length <= LARGEST_READ);
    let room = &proxy.intercept.authority.read_whole;
    let Some(_permit) = short.then(|| room.try_acquire().ok()).flatten() else {
        return Ok(body);
    };
    let whole = tokio::time::timeout(proxy.patience.body, body.collect()).await;
    let whole = whole.map_err(|_| ProxyError::Late)?.map_err(|_| ProxyError::Early)?.to_bytes();
    headers.insert(CONTENT_LENGTH, HeaderValue::from(whole.len()));
    Ok(full(whole))
}

/// An answer on its way in, without what was put into the request.
fn carry(
    answer: Response<Incoming>,
    flight: InFlightRequest,
    masks: &Replacements,
    json: bool,
) -> Response<Body> {
    let (mut parts, body) = answer.into_parts();
    head::strip_answer(&mut parts.headers);
    masks.headers(&mut parts.headers);
    let mut body = body.map_err(Broken::from).boxed_unsync();
    if !masks.is_empty() {
        // It is the server's own text, and is not needed.
        parts.extensions.remove::<ReasonPhrase>();
    }
    if !masks.is_empty() && !body.is_end_stream() {
        let unfit = if secrets::is_encoded(&parts.headers) {
            Some("compressed")
        } else {
            // No range was asked for: with a piece at a time a value would come through.
            (parts.status == StatusCode::PARTIAL_CONTENT).then_some("partial")
        };
        if let Some(what) = unfit {
            flight
                .record
                .failed(&format!("its answer is {what}, so that secrets in it cannot be masked"));
            let text = format!(
                "Sandkeep refused this answer: it is {what} although that was not asked for, and secrets in it could not be masked."
            );
            return reply(StatusCode::BAD_GATEWAY, text, json);
        }
        let masks = if secrets::is_text(&parts.headers) { masks.clone() } else { masks.covered() };
        if !masks.keeps_length() {
            parts.headers.remove(CONTENT_LENGTH);
        }
        body = ReplacedBody::new(body, &masks).impatient().boxed_unsync();
    }
    // The sandbox's side sends its own version.
    parts.version = hyper::Version::HTTP_11;
    Response::from_parts(parts, CountedBody::new(body, flight, masks).boxed_unsync())
}

/// A connection that speaks something else from here on.
fn tunnel(
    proxy: &ProxyConnection,
    mut answer: Response<Incoming>,
    asked: OnUpgrade,
    flight: InFlightRequest,
    masks: &Replacements,
) -> Response<Body> {
    flight.record.status(answer.status().as_u16());
    let switched = hyper::upgrade::on(&mut answer);
    let (mut parts, _) = answer.into_parts();
    let protocol = parts.headers.get(UPGRADE).cloned();
    head::strip_answer(&mut parts.headers);
    masks.headers(&mut parts.headers);
    if !masks.is_empty() {
        parts.extensions.remove::<ReasonPhrase>();
    }
    let is_websocket = protocol
        .as_ref()
        .is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(b"websocket"));
    let masks = masks.clone();
    parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol.filter(|name| masks.whole(name.as_bytes()).is_none()) {
        parts.headers.insert(UPGRADE, protocol);
    }
    proxy.tunnels.execute(async move {
        let both = async {
            let (Ok(inside), Ok(outside)) = tokio::join!(asked, switched) else { return };
            let (inside, outside) = (TokioIo::new(inside), TokioIo::new(outside));
            // Whichever side breaks it, it is over for both.
            let _ = tunnel::carry(inside, outside, &masks, is_websocket).await;
        };
        tokio::select! {
            () = both => {}
            () = flight.record.open.is_cut() => {}
        }
    });
    Response::from_parts(parts, full(Bytes::new()))
}
