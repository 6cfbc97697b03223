//! The name server that a sandbox sees: it answers at the gateway, by datagram and by TCP.
//!
//! - A name that no rule allows does not exist, and neither does any under `deny-all`. The answer says so in an
//!   extended error where the asker understands those.
//! - The *asked* name is what must be allowed, and what the addresses in the answer are pinned to;
//!   where aliases lead is up to the owner of the name.
//! - Addresses that lead inside are taken out of answers, and never more than [`ADDRESSES`] are given out.
//! - `HTTPS` and `SVCB` are answered as if there were none: they carry keys that would hide the
//!   server's name from the check, and addresses of their own. Clients do without.
//! - Other types are forwarded for names that are allowed.
//!
//! Upstream is `hickory-resolver`, with its cache, its repeats and its TCP. Nothing that comes from either side is
//! trusted to be well formed, small or fast: lookups have a deadline, their number at a time is
//! bounded, and more questions than that are ignored.

mod pins;
mod stand_ins;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinEncodable, BinEncoder};
use hickory_resolver::net::{DnsError, NetError};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::pins::Pins;
use self::stand_ins::StandIns;
use super::gate::Gate;
use super::log::FlowInfo;
use super::log::Refusals;
use super::rules::ActiveRules;
use super::sniff;
use super::special_addresses::Destination;
use super::upstream::Upstream;
use crate::model::Protocol;

/// The largest number of addresses in an answer.
const ADDRESSES: usize = 64;

/// How long a chain of aliases may be.
const ALIASES: usize = 16;

/// The largest number of other records in an answer.
const RECORDS: usize = 256;

/// The longest time to live in an answer to a sandbox: much shorter than the answer is pinned.
const REMEMBERED: u32 = 300;

/// How long what is answered here is remembered.
const FIXED: u32 = 60;

/// How long an address is remembered that stands for a host until it is approved.
const STANDS_FOR: u32 = 1;

/// How long a lookup may take.
const WITHIN: Duration = Duration::from_secs(12);

/// How many lookups are under way at once, and how many more may wait.
const AT_ONCE: usize = 64;
const WAITING: usize = 512;

/// How long a question by TCP may be, how many one connection may ask, and how long it may be silent.
const QUESTION: usize = 4096;
const QUESTIONS: usize = 1000;
const SILENCE: Duration = Duration::from_secs(15);

/// Extended errors, of RFC 8914.
const BLOCKED: u16 = 15;
const FILTERED: u16 = 17;

/// How a question came, and how long its answer may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueryTransport {
    Datagram,
    Stream,
}

/// The name server of one sandbox.
#[derive(Debug)]
pub(super) struct NameServer {
    upstream: Arc<Upstream>,
    rules: Arc<ActiveRules>,
    refusals: Arc<Refusals>,
    gate: Arc<dyn Gate>,
    pins: Mutex<Pins>,
    stand_ins: Mutex<StandIns>,
    heard: Semaphore,
    under_way: Semaphore,
}

/// What is known of a question when it is answered.
struct Question {
    query: Query,
    name: String,
    kind: RecordType,
}

/// What is answered.
struct DnsReply {
    code: ResponseCode,
    answers: Vec<Record>,
    authorities: Vec<Record>,
    /// An extended error and its text.
    because: Option<(u16, String)>,
}

impl DnsReply {
    fn new(code: ResponseCode) -> Self {
        Self { code, answers: Vec::new(), authorities: Vec::new(), because: None }
    }
}

impl NameServer {
    pub(super) fn new(
        upstream: Arc<Upstream>,
        rules: Arc<ActiveRules>,
        refusals: Arc<Refusals>,
        gate: Arc<dyn Gate>,
    ) -> Self {
        Self {
            upstream,
            rules,
            refusals,
            gate,
            pins: Mutex::default(),
            stand_ins: Mutex::default(),
            heard: Semaphore::new(AT_ONCE + WAITING),
            under_way: Semaphore::new(AT_ONCE),
        }
    }

    /// The names that an address was given out for, the latest first.
    pub(super) fn of(&self, ip: IpAddr) -> Vec<String> {
        self.pinned(|pins| pins.names(ip, Instant::now()))
    }

    /// Whether an address was given out for a name, or would be if it were asked for now: a daemon that was started
    /// anew has forgotten what an earlier one gave out.
    pub(super) async fn gave(&self, ip: IpAddr, name: &str) -> bool {
        if self.pinned(|pins| pins.holds(ip, name, Instant::now())) {
            return true;
        }
        let Ok(_turn) = self.under_way.acquire().await else { return false };
        let Ok(places) = self.upstream.places(name, 0).await else { return false };
        let found = places.iter().any(|destination| destination.asked.ip() == ip);
        if found {
            self.pinned(|pins| pins.give(ip, name, Instant::now()));
        }
        found
    }

    /// The name that an address stands for while its host is not approved.
    pub(super) fn stand_in(&self, ip: IpAddr) -> Option<String> {
        self.stand_ins.lock().name(ip)
    }

    /// The first of a name's addresses. It counts as given out for the name.
    pub(super) async fn place(&self, name: &str, port: u16) -> Option<Destination> {
        let _turn = self.under_way.acquire().await.ok()?;
        let places = timeout(WITHIN, self.upstream.places(name, port)).await.ok()?.ok()?;
        let place = *places.first()?;
        self.give(name, &[place.asked.ip()]);
        Some(place)
    }

    /// Answers a datagram; `None` when there is nothing to say.
    pub(super) async fn datagram(&self, question: &[u8]) -> Option<Vec<u8>> {
        self.answer(question, QueryTransport::Datagram).await
    }

    /// Answers a connection to its end.
    pub(super) async fn stream<S: AsyncRead + AsyncWrite + Unpin>(&self, mut guest: S) {
        for _ in 0..QUESTIONS {
            let Ok(Ok(length)) = timeout(SILENCE, guest.read_u16()).await else { return };
            let length = usize::from(length);
            if length > QUESTION {
                return;
            }
            let mut question = vec![0; length];
            let Ok(Ok(_)) = timeout(SILENCE, guest.read_exact(&mut question)).await else { return };
            let Some(answer) = self.answer(&question, QueryTransport::Stream).await else { return };
            let Ok(length) = u16::try_from(answer.len()) else { return };
            let mut whole = length.to_be_bytes().to_vec();
            whole.extend(answer);
            let Ok(Ok(())) = timeout(SILENCE, guest.write_all(&whole)).await else { return };
        }
    }

    async fn answer(&self, question: &[u8], via: QueryTransport) -> Option<Vec<u8>> {
        let _heard = self.heard.try_acquire().ok()?;
        let Ok(message) = Message::from_vec(question) else { return malformed(question) };
        if message.metadata.message_type != MessageType::Query {
            return None;
        }
        let reply = match asked(&message) {
            Ok(asked) => self.reply(&asked).await,
            Err(code) => DnsReply::new(code),
        };
        encode(&message, reply, via)
    }

    async fn reply(&self, asked: &Question) -> DnsReply {
        let Question { name, kind, .. } = asked;
        if name == "localhost" || name.ends_with(".localhost") {
            return fixed(asked, &[[127, 0, 0, 1].into(), IpAddr::V6(1.into())]);
        }
        if let Err(rule) = self.rules.now().lookup(name) {
            return self.refuse(asked, rule);
        }
        if self.gate.holds_hosts() {
            match self.gate.known(name) {
                Some(Ok(())) => {}
                Some(Err(why)) => return self.refuse(asked, why),
                None => return self.stand_for(asked),
            }
        }
        if let Some(ips) = self.upstream.fixed(name) {
            self.give(name, &ips);
            return fixed(asked, &ips);
        }
        match kind {
            RecordType::HTTPS | RecordType::SVCB => DnsReply::new(ResponseCode::NoError),
            RecordType::ANY => DnsReply::new(ResponseCode::NotImp),
            RecordType::AXFR | RecordType::IXFR => DnsReply::new(ResponseCode::Refused),
            RecordType::A | RecordType::AAAA => self.addresses(asked).await,
            _ => self.others(asked).await,
        }
    }

    /// Answers for a host that is not approved yet, without a query outside.
    fn stand_for(&self, asked: &Question) -> DnsReply {
        match asked.kind {
            RecordType::A => {
                let ip = IpAddr::V4(self.stand_ins.lock().of(&asked.name));
                let mut reply = fixed(asked, &[ip]);
                reply.answers.iter_mut().for_each(|record| record.ttl = STANDS_FOR);
                reply
            }
            RecordType::AAAA | RecordType::HTTPS | RecordType::SVCB => {
                DnsReply::new(ResponseCode::NoError)
            }
            _ => {
                let mut reply = DnsReply::new(ResponseCode::ServFail);
                let why = "nobody has approved this host yet; a connection to it asks";
                reply.because = Some((BLOCKED, why.to_owned()));
                reply
            }
        }
    }

    async fn addresses(&self, asked: &Question) -> DnsReply {
        let records = match self.resolve(asked).await {
            Ok(records) => records,
            Err(reply) => return *reply,
        };
        let mut reply = DnsReply::new(ResponseCode::NoError);
        let mut given = Vec::new();
        let mut kept_back = 0;
        for mut record in chain(asked, records) {
            let ip = match &record.data {
                RData::CNAME(_) => None,
                RData::A(ip) if asked.kind == RecordType::A => Some(IpAddr::V4(ip.0)),
                RData::AAAA(ip) if asked.kind == RecordType::AAAA => Some(IpAddr::V6(ip.0)),
                _ => continue,
            };
            if let Some(ip) = ip {
                match self.upstream.heard(ip) {
                    Some(_) if given.len() >= ADDRESSES => continue,
                    Some(spelled) => {
                        given.push(spelled);
                        record.data = address(spelled);
                    }
                    None => {
                        kept_back += 1;
                        continue;
                    }
                }
            }
            record.ttl = record.ttl.min(REMEMBERED);
            reply.answers.push(record);
        }
        // The rules may have changed while the name was looked up.
        if let Err(rule) = self.rules.now().lookup(&asked.name) {
            return self.refuse(asked, rule);
        }
        if given.is_empty() && kept_back > 0 {
            let rule = "always refused: the name leads to a private or special address";
            self.refused(&asked.name, rule.to_owned());
            reply.answers.clear();
            reply.because = Some((FILTERED, rule.to_owned()));
        }
        self.give(&asked.name, &given);
        reply
    }

    async fn others(&self, asked: &Question) -> DnsReply {
        let records = match self.resolve(asked).await {
            Ok(records) => records,
            Err(reply) => return *reply,
        };
        if let Err(rule) = self.rules.now().lookup(&asked.name) {
            return self.refuse(asked, rule);
        }
        let mut reply = DnsReply::new(ResponseCode::NoError);
        let wanted =
            |record: &Record| [asked.kind, RecordType::CNAME].contains(&record.record_type());
        reply.answers = records.into_iter().filter(wanted).take(RECORDS).collect();
        for record in &mut reply.answers {
            record.ttl = record.ttl.min(REMEMBERED);
        }
        reply
    }

    /// What upstream answers.
    async fn resolve(&self, asked: &Question) -> Result<Vec<Record>, Box<DnsReply>> {
        let failed = |code| Box::new(DnsReply::new(code));
        let Ok(_turn) = self.under_way.acquire().await else {
            return Err(failed(ResponseCode::ServFail));
        };
        let absolute = Name::from_ascii(format!("{}.", asked.name))
            .map_err(|_| failed(ResponseCode::FormErr))?;
        let resolver = self.upstream.resolver();
        let answer = timeout(WITHIN, resolver.lookup(absolute, asked.kind)).await;
        match answer.unwrap_or(Err(NetError::Timeout)) {
            Ok(found) => Ok(found.answers().to_vec()),
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                let mut reply = DnsReply::new(none.response_code);
                let soa = none.soa.map(|soa| soa.into_record_of_rdata());
                reply.authorities.extend(soa);
                for record in &mut reply.authorities {
                    record.ttl = record.ttl.min(FIXED);
                }
                Err(Box::new(reply))
            }
            Err(NetError::Dns(DnsError::ResponseCode(ResponseCode::NXDomain))) => {
                Err(failed(ResponseCode::NXDomain))
            }
            Err(error) => {
                tracing::debug!(%error, name = asked.name, "a lookup failed");
                Err(failed(ResponseCode::ServFail))
            }
        }
    }

    fn refuse(&self, asked: &Question, rule: String) -> DnsReply {
        self.refused(&asked.name, rule.clone());
        let mut reply = DnsReply::new(ResponseCode::NXDomain);
        reply.because = Some((BLOCKED, rule));
        reply
    }

    fn refused(&self, name: &str, rule: String) {
        let name = Some(name.to_owned());
        self.refusals.add(FlowInfo { protocol: Protocol::Dns, to: None, name, rule });
    }

    fn give(&self, name: &str, ips: &[IpAddr]) {
        let now = Instant::now();
        self.pinned(|pins| ips.iter().for_each(|ip| pins.give(*ip, name, now)));
    }

    fn pinned<T>(&self, act: impl FnOnce(&mut Pins) -> T) -> T {
        act(&mut self.pins.lock())
    }
}

/// The question of a message, or what is wrong with it.
fn asked(message: &Message) -> Result<Question, ResponseCode> {
    if message.metadata.op_code != OpCode::Query {
        return Err(ResponseCode::NotImp);
    }
    if message.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return Err(ResponseCode::BADVERS);
    }
    let [query] = message.queries.as_slice() else { return Err(ResponseCode::FormErr) };
    if query.query_class() != DNSClass::IN {
        return Err(ResponseCode::Refused);
    }
    // Labels may hold any byte, dots included; no real name has such.
    let labels: Vec<&[u8]> = query.name().iter().collect();
    if labels.iter().any(|label| label.contains(&b'.')) {
        return Err(ResponseCode::NXDomain);
    }
    let name = sniff::name(&labels.join(&b'.')).ok_or(ResponseCode::NXDomain)?;
    Ok(Question { kind: query.query_type(), name, query: query.clone() })
}

/// Of some records, those that belong to the asked name and its aliases. A server may say whatever it likes about
/// other names; they are not what was asked.
fn chain(asked: &Question, records: Vec<Record>) -> Vec<Record> {
    let mut owners = vec![asked.query.name().to_lowercase()];
    for _ in 0..ALIASES {
        let known = owners.last().cloned();
        let alias = records.iter().find_map(|record| match &record.data {
            RData::CNAME(to) if known.as_ref() == Some(&record.name.to_lowercase()) => {
                Some(to.0.to_lowercase())
            }
            _ => None,
        });
        match alias {
            Some(alias) if !owners.contains(&alias) => owners.push(alias),
            _ => break,
        }
    }
    records.into_iter().filter(|record| owners.contains(&record.name.to_lowercase())).collect()
}

fn address(ip: IpAddr) -> RData {
    match ip {
        IpAddr::V4(ip) => RData::A(ip.into()),
        IpAddr::V6(ip) => RData::AAAA(ip.into()),
    }
}

/// The answer for a name whose addresses are known here.
fn fixed(asked: &Question, ips: &[IpAddr]) -> DnsReply {
    let mut reply = DnsReply::new(ResponseCode::NoError);
    let records = ips.iter().map(|ip| address(*ip)).filter(|data| data.record_type() == asked.kind);
    reply.answers =
        records.map(|data| Record::from_rdata(asked.query.name().clone(), FIXED, data)).collect();
    reply
}

/// The answer to bytes that are no message: an error, if they are enough to address one.
fn malformed(question: &[u8]) -> Option<Vec<u8>> {
    let &[high, low, flags, ..] = question else { return None };
    let is_answer = flags & 0x80 != 0;
    if is_answer || question.len() < 12 {
        return None;
    }
    let id = u16::from_be_bytes([high, low]);
    Message::error_msg(id, OpCode::Query, ResponseCode::FormErr).to_vec().ok()
}

fn encode(question: &Message, reply: DnsReply, via: QueryTransport) -> Option<Vec<u8>> {
    let asked = question.metadata;
    let mut message = Message::response(asked.id, asked.op_code);
    message.metadata.recursion_desired = asked.recursion_desired;
    message.metadata.recursion_available = true;
    message.metadata.checking_disabled = asked.checking_disabled;
    message.metadata.response_code = reply.code;
    message.queries.extend(question.queries.first().cloned());
    message.answers = reply.answers;
    message.authorities = reply.authorities;
    let mut most = 512;
    if let Some(theirs) = &question.edns {
        most = theirs.max_payload().clamp(512, 4096);
        let mut edns = Edns::new();
        edns.set_max_payload(4096);
        if let Some((code, text)) = reply.because {
            let mut body = code.to_be_bytes().to_vec();
            body.extend(text.bytes().take(128));
            edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, body));
        }
        message.set_edns(edns);
    }
    let most = if via == QueryTransport::Stream { u16::MAX } else { most };
    emit(&message, most).or_else(|| emit(&message.truncate(), most))
}

fn emit(message: &Message, most: u16) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(most);
    message.emit(&mut encoder).ok()?;
    Some(bytes)
}

const EXTENDED_ERROR: u16 = 15;

#[cfg(test)]
pub(super) mod tests;
