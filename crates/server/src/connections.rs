//! Limits on connections: in all, from one address, with one key.
//!
//! A connection costs a descriptor, and descriptors are what the daemon needs for its own work: logs, layers, machines. So
//! connections are bounded, and at a bound room is made in this order:
//!
//! 1. Where an address is at its bound, its longest idle connection is closed for the new one; where all are, the longest
//!    idle of all. *Idle* is a connection without a request under way, and also one that has not sent its first request. A
//!    caller with a request to make sends it at once, so a crowd of silent connections displaces
//!    only itself.
//! 2. Where none is idle the new one is answered 503 with `Retry-After` and closed.
//!
//! Connections on the Unix socket, which only its owner can open, have a bound of their own: the
//! operator's way in is not taken by others. A key that has too many connections is answered 429
//! with `Retry-After`.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::Resource;
use sandkeep_core::model::KeyId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;

use crate::limits::Limits;

/// How many connections may be on their way out before the next one is taken.
const LEAVING: usize = 256;
/// How many connections the Unix socket may have, and the part of the descriptors that they may be.
const LOCAL: usize = 1024;
const LOCAL_PART: usize = 8;

/// Who is connected.
#[derive(Debug)]
pub(crate) struct Connections {
    total: usize,
    per_address: usize,
    per_key: usize,
    local: usize,
    state: Mutex<State>,
}

/// Where connections are counted together: an address, a network of IPv6, or the Unix socket.
type ConnectionSource = Option<IpAddr>;

#[derive(Debug, Default)]
struct State {
    next: u64,
    all: HashMap<u64, One>,
    /// Those that came over TCP.
    total: usize,
    /// Those without a request, the longest idle first.
    idle: BTreeMap<u64, u64>,
    from: HashMap<ConnectionSource, Group>,
    keys: HashMap<KeyId, usize>,
    /// Those that were closed and are not gone yet.
    leaving: usize,
    /// How many were closed to make room since the start, and how many found none.
    displaced: u64,
    refused: u64,
}

/// Who is connected, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectionCounts {
    pub(crate) tcp: usize,
    pub(crate) unix: usize,
    pub(crate) displaced: u64,
    pub(crate) refused: u64,
}

#[derive(Debug, Default)]
struct Group {
    count: usize,
    idle: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct One {
    from: ConnectionSource,
    /// Where it stands among the idle.
    idle: Option<u64>,
    requests: usize,
    /// It is a stream of bytes now, and never idle again.
    upgraded: bool,
    key: Option<KeyId>,
    cut: Arc<Notify>,
}

/// There is no room, and none can be made.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl Connections {
    /// As `limits` say, but never more than half of the descriptors this process may have.
    pub(crate) fn new(limits: &Limits) -> Arc<Self> {
        let descriptors = rustix::process::getrlimit(Resource::Nofile).current;
        let descriptors = descriptors.and_then(|most| usize::try_from(most).ok());
        Self::within(limits, descriptors.unwrap_or(usize::MAX))
    }

    fn within(limits: &Limits, descriptors: usize) -> Arc<Self> {
        let total = limits.connections.min(descriptors / 2).max(1);
        Arc::new(Self {
            total,
            per_address: limits.connections_per_address.min(total).max(1),
            per_key: limits.connections_per_key.max(1),
            local: LOCAL.min(descriptors / LOCAL_PART).max(1),
            state: Mutex::default(),
        })
    }

    /// Takes a connection in.
    pub(crate) fn admit(self: &Arc<Self>, peer: Option<IpAddr>) -> Result<Arc<Slot>, Full> {
        let mut state = self.lock();
        let admitted = self.admit_to(&mut state, peer.map(network));
        state.refused += u64::from(admitted.is_err());
        admitted
    }

    fn admit_to(
        self: &Arc<Self>,
        state: &mut State,
        from: ConnectionSource,
    ) -> Result<Arc<Slot>, Full> {
        let here = state.from.get(&from).map_or(0, |group| group.count);
        let most = if from.is_some() { self.per_address } else { self.local };
        if here >= most {
            let longest = state.from.get(&from).and_then(|group| group.idle.values().next());
            let longest = *longest.ok_or(Full)?;
            state.evict(longest);
        } else if from.is_some() && state.total >= self.total {
            // Not those of the Unix socket: they are not in this sum.
            let longest = state.idle.values().next();
            let longest = *longest.ok_or(Full)?;
            state.evict(longest);
        }
        let id = state.number();
        let cut = Arc::new(Notify::new());
        let one = One {
            from,
            idle: None,
            requests: 0,
            upgraded: false,
            key: None,
            cut: Arc::clone(&cut),
        };
        state.all.insert(id, one);
        state.total += usize::from(from.is_some());
        state.from.entry(from).or_default().count += 1;
        state.rest(id);
        Ok(Arc::new(Slot { connections: Arc::clone(self), id, cut }))
    }

    /// Who is connected, in numbers.
    pub(crate) fn counts(&self) -> ConnectionCounts {
        let state = self.lock();
        let unix = state.from.get(&None).map_or(0, |group| group.count);
        let (displaced, refused) = (state.displaced, state.refused);
        ConnectionCounts { tcp: state.total, unix, displaced, refused }
    }

    /// Whether enough are being closed that the next one should wait.
    pub(crate) fn is_busy_closing(&self) -> bool {
        self.lock().leaving > LEAVING
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// What an address counts as: an IPv6 network belongs to one subscriber.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
        }
        address => address,
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Lists it among the idle.
    fn rest(&mut self, id: u64) {
        let since = self.number();
        let Some(one) = self.all.get_mut(&id) else { return };
        if one.requests > 0 || one.upgraded || one.idle.is_some() {
            return;
        }
        one.idle = Some(since);
        if one.from.is_some() {
            self.idle.insert(since, id);
        }
        self.from.entry(one.from).or_default().idle.insert(since, id);
    }

    /// Strikes it from the idle.
    fn wake(&mut self, id: u64) {
        let Some(one) = self.all.get_mut(&id) else { return };
        if let Some(since) = one.idle.take() {
            self.idle.remove(&since);
            if let Some(group) = self.from.get_mut(&one.from) {
                group.idle.remove(&since);
            }
        }
    }

    /// Closes it. It counts no longer.
    fn evict(&mut self, id: u64) {
        if let Some(cut) = self.strike(id) {
            self.leaving += 1;
            self.displaced += 1;
            cut.notify_one();
        }
    }

    fn strike(&mut self, id: u64) -> Option<Arc<Notify>> {
        self.wake(id);
        let one = self.all.remove(&id)?;
        self.total -= usize::from(one.from.is_some());
        if let Some(group) = self.from.get_mut(&one.from) {
            group.count -= 1;
            if group.count == 0 {
                self.from.remove(&one.from);
            }
        }
        self.release(one.key);
        Some(one.cut)
    }

    fn release(&mut self, key: Option<KeyId>) {
        let Some(key) = key else { return };
        if let Some(count) = self.keys.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.keys.remove(&key);
            }
        }
    }
}

/// The place of one connection; free when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    connections: Arc<Connections>,
    id: u64,
    cut: Arc<Notify>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        if state.strike(self.id).is_none() {
            state.leaving -= 1;
        }
    }
}

impl Slot {
    /// Waits until it is closed to make room.
    pub(crate) async fn cut(&self) {
        self.cut.notified().await;
    }

    /// A request is under way until the answer is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> Request {
        let mut state = self.connections.lock();
        state.wake(self.id);
        if let Some(one) = state.all.get_mut(&self.id) {
            one.requests += 1;
        }
        drop(state);
        Request(Arc::clone(self))
    }

    /// Counts it for a key, once.
    fn charge(&self, key: &KeyId) -> Result<(), Full> {
        let mut state = self.connections.lock();
        let Some(one) = state.all.get(&self.id) else { return Ok(()) };
        if one.key.as_ref() == Some(key) {
            return Ok(());
        }
        let count = state.keys.get(key).copied().unwrap_or(0);
        if count >= self.connections.per_key {
            return Err(Full);
        }
        state.keys.insert(key.clone(), count + 1);
        let before = state.all.get_mut(&self.id).and_then(|one| one.key.replace(key.clone()));
        state.release(before);
        Ok(())
    }
}

/// The connection a request came on; every request carries it.
#[derive(Debug, Clone)]
pub(crate) struct Via(Weak<Slot>);

impl Via {
    pub(crate) fn new(slot: &Arc<Slot>) -> Self {
        Self(Arc::downgrade(slot))
    }

    /// Whether the connection is open.
    pub(crate) fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Whether it is the same connection.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.ptr_eq(&other.0)
    }

    /// Counts the connection for a key.
    pub(crate) fn charge(&self, key: &KeyId) -> Result<(), Full> {
        self.0.upgrade().map_or(Ok(()), |slot| slot.charge(key))
    }
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct Request(Arc<Slot>);

impl Request {
    /// Lasts until all of the answer is sent; a connection that becomes a stream of bytes stays busy.
    pub(crate) fn answered(self, response: hyper::Response<Body>) -> hyper::Response<Body> {
        if response.status() == hyper::StatusCode::SWITCHING_PROTOCOLS
            && let Some(one) = self.0.connections.lock().all.get_mut(&self.0.id)
        {
            one.upgraded = true;
        }
        response.map(|body| Body::new(CountedBody { body, _request: self }))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let mut state = self.0.connections.lock();
        if let Some(one) = state.all.get_mut(&self.0.id) {
            one.requests -= 1;
        }
        state.rest(self.0.id);
    }
}

/// A body that holds its request.
struct CountedBody {
    body: Body,
    _request: Request,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that holds its place for as long as it is open, whatever its use: HTTP, or what came
/// after an upgrade.
#[derive(Debug)]
pub(crate) struct Counted<S> {
    stream: S,
    _slot: Arc<Slot>,
}

impl<S> Counted<S> {
    pub(crate) fn new(stream: S, slot: Arc<Slot>) -> Self {
        Self { stream, _slot: slot }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Answers a connection that there is no room, without waiting for anything.
pub(crate) fn turn_away(stream: TcpStream) {
    if let Ok(mut stream) = stream.into_std() {
        tell_full(&mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

/// The same on the Unix socket.
pub(crate) fn turn_away_local(stream: UnixStream) {
    if let Ok(mut stream) = stream.into_std() {
        tell_full(&mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    }
}

fn tell_full(stream: &mut (impl io::Read + io::Write)) {
    const BODY: &str = r#"{"error":{"code":"too_many_connections","message":"this server has too many connections","hint":"close some, or try again in a moment"}}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    // What it has sent already is read, so that closing does not reset the connection under the answer.
    let _ = stream.read(&mut [0; 4096]);
    let _ = stream.write(answer.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use sandkeep_core::model::KeyId;

    use super::{Connections, Full, network};
    use crate::limits::Limits;

    fn bounded(total: usize, per_address: usize, per_key: usize) -> Arc<Connections> {
        let limits = Limits {
            connections: total,
            connections_per_address: per_address,
            connections_per_key: per_key,
            ..Limits::default()
        };
        Connections::within(&limits, usize::MAX)
    }

    fn from(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    #[tokio::test]
    async fn the_longest_idle_makes_room_and_the_busy_stay() {
        let connections = bounded(3, 2, 9);
        let first = connections.admit(from(1)).expect("room");
        let busy = first.request();
        let second = connections.admit(from(1)).expect("room");
        let third = connections.admit(from(1)).expect("room is made");
        second.cut().await;
        assert_eq!(connections.lock().total, 2, "one that was closed does not count");
        let both = third.request();
        assert_eq!(connections.admit(from(1)).map(|_| ()), Err(Full), "both are busy");
        let other = connections.admit(from(2)).expect("another address has room");
        let fourth = connections.admit(from(3)).expect("the idle one of all makes room");
        other.cut().await;
        let local: Vec<_> = (0..5).map(|_| connections.admit(None).expect("its own")).collect();
        drop((busy, both));
        let fifth = connections.admit(from(4)).expect("room is made");
        // The order is of having become idle: the fourth was before the others.
        fourth.cut().await;
        drop((first, second, third, other, fourth, fifth, local));
        let state = connections.lock();
        assert_eq!((state.total, state.leaving, state.all.len()), (0, 0, 0));
        assert!(state.idle.is_empty() && state.from.is_empty());
    }

    #[test]
    fn a_key_has_so_many_connections_and_no_more() {
        let connections = bounded(9, 9, 2);
        let (one, other) = (KeyId::fresh(), KeyId::fresh());
        let slots: Vec<_> = (0..3).map(|n| connections.admit(from(n)).expect("room")).collect();
        assert_eq!(slots[0].charge(&one), Ok(()));
        assert_eq!(slots[0].charge(&one), Ok(()), "once");
        assert_eq!(slots[1].charge(&one), Ok(()));
        assert_eq!(slots[2].charge(&one), Err(Full));
        assert_eq!(slots[1].charge(&other), Ok(()), "it is another's now");
        assert_eq!(slots[2].charge(&one), Ok(()));
        drop(slots);
        assert!(connections.lock().keys.is_empty());
    }

    #[test]
    fn half_of_the_descriptors_are_not_for_connections() {
        let connections = Connections::within(&Limits::default(), 1024);
        assert_eq!((connections.total, connections.per_address), (512, 512));
    }

    #[test]
    fn an_ipv6_network_counts_as_one() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert_eq!(network(address("2001:db8::1")), network(address("2001:db8::2:3")));
        assert_ne!(network(address("2001:db8::1")), network(address("2001:db8:0:1::1")));
        assert_eq!(network(address("::ffff:192.0.2.1")), address("192.0.2.1"));
        assert_eq!(network(address("::1")), address("::1"));
    }

    #[tokio::test]
    async fn who_finds_the_unix_socket_full_is_told() {
        use tokio::io::AsyncReadExt as _;
        let connections = Connections::within(&Limits::default(), 80);
        let held: Vec<_> = (0..10).map(|_| connections.admit(None).expect("room")).collect();
        let busy: Vec<_> = held.iter().map(super::Slot::request).collect();
        assert_eq!(connections.admit(None).err(), Some(Full), "an eighth of the descriptors");
        drop(busy);
        connections.admit(None).expect("one that is idle makes room");
        let (ours, mut theirs) = tokio::net::UnixStream::pair().expect("a pair");
        super::turn_away_local(ours);
        let mut told = String::new();
        theirs.read_to_string(&mut told).await.expect("it is closed after that");
        assert!(told.starts_with("HTTP/1.1 503 ") && told.contains("retry-after: 1"), "{told}");
    }
}
