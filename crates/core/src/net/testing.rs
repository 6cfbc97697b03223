//! What tests of the network share: a journal to look into, and name servers with preset answers.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Message, OpCode};
use hickory_proto::rr::{Name, RData, Record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

use super::gate::{Answered, Contact, Gate, OpenGate};
use super::log::{ConnectionLog, Journal, Traffic};
use super::rules::Rules;
use super::upstream::{Upstream, UpstreamSettings};
use crate::model::{BadPolicy, Connection, Policy, SessionId, Verdict};

/// A gate that holds nothing.
pub(super) fn open_gate() -> Arc<dyn Gate> {
    Arc::new(OpenGate)
}

/// A gate that holds everything until a test has answered: hosts, and secrets as `NAME at host`.
#[derive(Debug, Default)]
pub(super) struct TestGate {
    answers: Mutex<BTreeMap<String, Answered>>,
    asked: Mutex<Vec<String>>,
    changed: tokio::sync::Notify,
}

impl TestGate {
    pub(super) fn answer(&self, target: &str, answer: Answered) {
        self.answers.lock().unwrap().insert(target.to_owned(), answer);
        self.changed.notify_waiters();
    }

    /// What was asked so far, each once.
    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// Waits, for a bounded time, until something is asked.
    pub(super) async fn is_asked(&self, target: &str) {
        for _ in 0..500 {
            if self.asked().iter().any(|asked| asked == target) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nobody asked for {target}, but for {:?}", self.asked());
    }

    fn note(&self, target: &str) {
        let mut asked = self.asked.lock().unwrap();
        if !asked.iter().any(|before| before == target) {
            asked.push(target.to_owned());
        }
    }

    async fn answered(&self, target: &str) -> Answered {
        self.note(target);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(answer) = self.known(target) {
                return answer;
            }
            changed.await;
        }
    }
}

#[async_trait::async_trait]
impl Gate for TestGate {
    fn holds_hosts(&self) -> bool {
        true
    }

    fn known(&self, host: &str) -> Option<Answered> {
        self.answers.lock().unwrap().get(host).cloned()
    }

    async fn contact(&self, contact: &Contact) -> Answered {
        self.answered(&contact.host).await
    }

    fn ask(&self, contact: Contact) {
        self.note(&contact.host);
    }

    fn holds_secret(&self, _secret: &str) -> bool {
        true
    }

    fn known_secret(&self, secret: &str, host: &str) -> Option<Answered> {
        self.known(&format!("{secret} at {host}"))
    }

    async fn secret(&self, secret: &str, host: &str) -> Answered {
        self.answered(&format!("{secret} at {host}")).await
    }
}

/// A journal in memory.
#[derive(Debug, Default)]
pub(super) struct Notes(Mutex<Vec<Connection>>);

impl Journal for Notes {
    fn write(&self, connection: Connection) {
        self.0.lock().unwrap().push(connection);
    }
}

impl Notes {
    pub(super) fn all(&self) -> Vec<Connection> {
        self.0.lock().unwrap().clone()
    }

    /// What was written down, as `verdict name rule`.
    pub(super) fn lines(&self) -> Vec<String> {
        let line = |note: Connection| {
            let name = note.name.unwrap_or_else(|| "-".to_owned());
            format!("{:?} {name} {}", note.verdict, note.rule)
        };
        self.all().into_iter().map(line).collect()
    }

    /// Waits, for a bounded time, until something of this verdict is written down.
    pub(super) async fn wait_for(&self, verdict: Verdict) -> Connection {
        for _ in 0..500 {
            if let Some(found) = self.all().into_iter().find(|note| note.verdict == verdict) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nothing {verdict:?} was written down: {:?}", self.lines());
    }
}

pub(super) fn connection_log() -> (Arc<ConnectionLog>, Arc<Notes>) {
    let notes = Arc::new(Notes::default());
    (ConnectionLog::new(SessionId::fresh(), notes.clone(), Traffic::default()), notes)
}

pub(super) fn rules(json: &str) -> Arc<Rules> {
    let policy: Policy = serde_json::from_str(json).unwrap();
    policy.check("network").unwrap();
    let reveal = |_: &_| Err(BadPolicy("no credentials here".to_owned()));
    Arc::new(Rules::new(&policy, None, Vec::new(), &reveal).unwrap())
}

/// What is outside, with these exceptions and names.
pub(super) fn upstream(
    except: &[&str],
    hosts: &[(&str, &[&str])],
    resolver: Option<SocketAddr>,
) -> Arc<Upstream> {
    let ips = |ips: &[&str]| ips.iter().map(|ip| ip.parse::<IpAddr>().unwrap()).collect();
    let hosts: BTreeMap<_, _> =
        hosts.iter().map(|(name, list)| ((*name).to_owned(), ips(list))).collect();
    // A server that does not exist, instead of the host's own: tests query no other.
    let nobody = SocketAddr::from(([127, 0, 0, 1], 9));
    let settings = UpstreamSettings {
        except: except.iter().map(|rule| rule.parse().unwrap()).collect(),
        resolvers: vec![resolver.unwrap_or(nobody)],
        hosts,
        ca: None,
    };
    Arc::new(Upstream::new(settings).unwrap())
}

/// A name server that answers each question with what a function makes of it; silent where that is nothing.
pub(super) struct FakeNameServer {
    pub(super) at: SocketAddr,
    pub(super) asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl FakeNameServer {
    pub(super) async fn start(
        answer: impl Fn(&Message) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        // The same port for both; another process may have one of them.
        let (datagrams, streams) = loop {
            let datagrams = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(streams) = TcpListener::bind(datagrams.local_addr().unwrap()).await {
                break (datagrams, streams);
            }
        };
        let at = datagrams.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&asked);
        let answer = Arc::new(move |question: &[u8]| {
            let message = Message::from_vec(question).ok()?;
            noted.lock().unwrap().push(message.queries[0].name().to_string());
            answer(&message)
        });
        let by_stream = Arc::clone(&answer);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut question = [0; 4096];
            while let Ok((length, from)) = datagrams.recv_from(&mut question).await {
                if let Some(answer) = answer(&question[..length]) {
                    let answer = fit(answer);
                    let _ = datagrams.send_to(&answer, from).await;
                }
            }
        });
        tasks.spawn(async move {
            while let Ok((mut stream, _)) = streams.accept().await {
                while let Ok(length) = stream.read_u16().await {
                    let mut question = vec![0; length.into()];
                    if stream.read_exact(&mut question).await.is_err() {
                        break;
                    }
                    let Some(answer) = by_stream(&question) else { break };
                    let _ = stream.write_u16(u16::try_from(answer.len()).unwrap()).await;
                    let _ = stream.write_all(&answer).await;
                }
            }
        });
        Self { at, asked, _tasks: tasks }
    }
}

/// What fits into a datagram of an answer.
fn fit(answer: Vec<u8>) -> Vec<u8> {
    match Message::from_vec(&answer) {
        Ok(message) if answer.len() > 1232 => message.truncate().to_vec().unwrap(),
        _ => answer,
    }
}

/// An answer to a question that holds these records.
pub(super) fn answer(question: &Message, records: Vec<(&str, u32, RData)>) -> Message {
    let mut message = Message::response(question.metadata.id, OpCode::Query);
    message.metadata.recursion_available = true;
    message.queries.clone_from(&question.queries);
    for (owner, ttl, data) in records {
        message.add_answer(Record::from_rdata(Name::from_ascii(owner).unwrap(), ttl, data));
    }
    message
}
