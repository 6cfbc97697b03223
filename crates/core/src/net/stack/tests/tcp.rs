//! Connections of a well-behaved sandbox.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use smoltcp::socket::tcp::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::guest::{FakeGuest, PATIENCE, take};
use super::{FakeHandler, Say, StackLimits, outside, pattern, start};

async fn listener(v4: bool) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(if v4 { "127.0.0.1:0" } else { "[::1]:0" }).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Sends back what it reads, until the end.
async fn echo(mut stream: TcpStream) {
    let (mut read, mut write) = stream.split();
    tokio::io::copy(&mut read, &mut write).await.unwrap();
    write.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_dialled_is_carried_both_ways_and_counted() {
    for v4 in [true, false] {
        let (listener, address) = listener(v4).await;
        let server = tokio::spawn(async move { echo(listener.accept().await.unwrap().0).await });
        let handler = FakeHandler::new();
        handler.say(outside(v4, 443), Say::Dial(address));
        let (stack, _, end) = start(StackLimits::default(), &handler);
        let mut guest = FakeGuest::new(end);

        let data = pattern(3_000_000);
        let handle = guest.connect(outside(v4, 443), 300_000);
        let came = guest.exchange(handle, &data).await;

        assert!(came == data, "what came back is not what was sent (v4: {v4})");
        server.await.unwrap();
        let traffic = handler.log.traffic();
        assert_eq!((traffic.sent, traffic.received), (3_000_000, 3_000_000));
        assert_eq!(handler.asked(), 1);
        stack.close().await;
        assert_eq!(handler.carried.lock().unwrap().len(), 0);
    }
}

#[tokio::test]
async fn who_ended_one_direction_still_hears_the_other() {
    let (listener, address) = listener(true).await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut asked = Vec::new();
        stream.read_to_end(&mut asked).await.unwrap();
        // The sandbox has ended its direction long before it is answered.
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(&pattern(200_000)).await.unwrap();
        asked
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 80), 20_000);
    let came = guest.exchange(handle, b"all I have to say").await;

    assert_eq!(server.await.unwrap(), b"all I have to say");
    assert!(came == pattern(200_000));
}

#[tokio::test]
async fn outside_may_end_first() {
    let (listener, address) = listener(true).await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"bye").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        rest
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 80), 20_000);
    guest.until("the end", |guest| guest.state(handle) == State::CloseWait).await;
    let mut came = Vec::new();
    take(guest.socket(handle), &mut came);
    assert_eq!(came, b"bye");
    guest.socket(handle).send_slice(b"and something else").unwrap();
    guest.socket(handle).close();
    guest.until("closed", |guest| guest.state(handle) == State::Closed).await;
    assert_eq!(server.await.unwrap(), b"and something else");
}

#[tokio::test]
async fn what_is_refused_or_unanswered_is_reset() {
    let (listener, gone) = listener(true).await;
    drop(listener);
    let handler = FakeHandler::new();
    handler.say(outside(true, 81), Say::Dial(gone));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    for port in [80, 81] {
        let handle = guest.connect(outside(true, port), 5000);
        guest.until("a reset", |guest| guest.state(handle) == State::Closed).await;
    }
    assert_eq!(*handler.unanswered.lock().unwrap(), [std::io::ErrorKind::ConnectionRefused]);
}

#[tokio::test]
async fn a_dial_that_nobody_answers_ends() {
    // A full backlog answers no connection.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let full = socket.local_addr().unwrap().as_socket().unwrap();
    let _first = TcpStream::connect(full).await.unwrap();
    let mut more = Vec::new();
    while let Ok(Ok(stream)) = timeout(Duration::from_millis(50), TcpStream::connect(full)).await {
        more.push(stream);
        assert!(more.len() < 16, "the backlog fills");
    }
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Dial(full));
    let limits = StackLimits { dial: Duration::from_millis(100), ..StackLimits::default() };
    let (_stack, _, end) = start(limits, &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 80), 5000);
    guest.until("a reset", |guest| guest.state(handle) == State::Closed).await;
    assert_eq!(*handler.unanswered.lock().unwrap(), [std::io::ErrorKind::TimedOut]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_read_and_written_by_whoever_serves_it() {
    let handler = FakeHandler::new();
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    for v4 in [true, false] {
        handler.say(outside(v4, 53), Say::Echo);
        let handle = guest.connect(outside(v4, 53), 100_000);
        let data = pattern(1_000_000);
        assert!(guest.exchange(handle, &data).await == data);
    }
}

#[tokio::test]
async fn an_answer_arrives_although_the_question_was_not_read() {
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Answer(b"no"));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 80), 100_000);
    assert_eq!(guest.exchange(handle, &pattern(500_000)).await, b"no");
}

#[tokio::test]
async fn who_goes_on_sending_to_nobody_is_reset() {
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Answer(b"no"));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 80), 100_000);
    let chunk = pattern(50_000);
    let mut sent = 0;
    guest
        .until("a reset", |guest| {
            let socket = guest.socket(handle);
            if socket.can_send() {
                sent += socket.send_slice(&chunk).unwrap();
            }
            socket.state() == State::Closed
        })
        .await;
    assert!(sent < 3_000_000, "{sent} bytes were taken from who was not wanted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_connections_at_once_lose_nothing() {
    let (listener, address) = listener(true).await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(echo(stream));
        }
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let data = pattern(60_000);
    let handles: Vec<_> = (0..200).map(|_| guest.connect(outside(true, 443), 30_000)).collect();
    let mut sent = vec![0; handles.len()];
    let mut got = vec![Vec::new(); handles.len()];
    guest
        .until("all of them", |guest| {
            for (at, handle) in handles.iter().enumerate() {
                let socket = guest.socket(*handle);
                if socket.can_send() && sent[at] < data.len() {
                    sent[at] += socket.send_slice(&data[sent[at]..]).unwrap();
                }
                take(socket, &mut got[at]);
            }
            got.iter().all(|got| got.len() >= data.len())
        })
        .await;
    assert!(got.iter().all(|got| *got == data));
    assert_eq!(handler.carried.lock().unwrap().len(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_does_not_read_stops_outside() {
    let (listener, address) = listener(true).await;
    let written = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&written);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let chunk = pattern(64 * 1024);
        for _ in 0..1024 {
            stream.write_all(&chunk).await.unwrap();
            counter.fetch_add(chunk.len(), Ordering::Relaxed);
        }
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 443), 30_000);
    let mut before = usize::MAX;
    for _ in 0..40 {
        guest.rest(Duration::from_millis(100)).await;
        let now = written.load(Ordering::Relaxed);
        if now == before && now > 0 {
            break;
        }
        before = now;
    }
    // The host's own socket buffers are the larger part of it.
    let stuck = written.load(Ordering::Relaxed);
    assert!(stuck < 32 << 20, "{stuck} bytes were taken for who does not read");
    let through = handler.log.traffic().received;
    assert!(through < 1 << 20, "{through} bytes are buffered for who does not read");

    let (mut got, chunk) = (Vec::new(), pattern(64 * 1024));
    guest
        .until("the rest", |guest| {
            take(guest.socket(handle), &mut got);
            got.len() >= 4 << 20
        })
        .await;
    assert!(got.chunks_exact(64 * 1024).all(|piece| piece == chunk));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outside_that_does_not_read_stops_the_sandbox() {
    let (listener, address) = listener(true).await;
    let (go, wait) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        wait.await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        got
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 443), 100_000);
    let chunk = pattern(64 * 1024);
    let (mut sent, mut before) = (0_usize, usize::MAX);
    for _ in 0..40 {
        let began = std::time::Instant::now();
        guest
            .until("sending", |guest| {
                let socket = guest.socket(handle);
                let at = sent % chunk.len();
                if socket.can_send() {
                    sent += socket.send_slice(&chunk[at..]).unwrap();
                }
                began.elapsed() > Duration::from_millis(100)
            })
            .await;
        if sent == before && sent > 0 {
            break;
        }
        before = sent;
    }
    assert!(sent < 32 << 20, "{sent} bytes were taken for who does not read");
    go.send(()).unwrap();
    guest.socket(handle).close();
    guest.until("the end", |guest| guest.state(handle) != State::FinWait1).await;
    let got = timeout(PATIENCE, server).await.unwrap().unwrap();
    assert_eq!(got.len(), sent);
    assert!(got.chunks_exact(chunk.len()).all(|piece| piece == chunk));
}

#[tokio::test]
async fn what_is_cut_is_reset_on_both_sides() {
    let (listener, address) = listener(true).await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.map_err(|error| error.kind())
    });
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 443), 10_000);
    guest
        .until("established", |guest| {
            guest.state(handle) == State::Established && handler.carried.lock().unwrap().len() == 1
        })
        .await;

    let open = handler.carried.lock().unwrap()[0].clone();
    open.cut("no longer".into());
    guest.until("a reset", |guest| guest.state(handle) == State::Closed).await;
    assert_eq!(server.await.unwrap(), Err(std::io::ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn what_is_cut_while_it_is_dialled_is_reset() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let full = socket.local_addr().unwrap().as_socket().unwrap();
    let mut more = Vec::new();
    while let Ok(Ok(stream)) = timeout(Duration::from_millis(50), TcpStream::connect(full)).await {
        more.push(stream);
        assert!(more.len() < 16, "the backlog fills");
    }
    let handler = FakeHandler::new();
    handler.say(outside(true, 80), Say::Dial(full));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 80), 5000);
    guest.until("a question", |_| handler.asked() == 1).await;
    for open in handler.log.open() {
        open.cut("no longer".into());
    }
    guest.until("a reset", |guest| guest.state(handle) == State::Closed).await;
}

#[tokio::test]
async fn a_reset_outside_is_a_reset_inside_and_the_other_way_round() {
    let (listener, address) = listener(true).await;
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (_stack, _, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);

    let handle = guest.connect(outside(true, 443), 10_000);
    guest.until("established", |guest| guest.state(handle) == State::Established).await;
    let (stream, _) = listener.accept().await.unwrap();
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
    guest.until("a reset", |guest| guest.state(handle) == State::Closed).await;

    let handle = guest.connect(outside(true, 443), 10_000);
    guest.until("established", |guest| guest.state(handle) == State::Established).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    guest.socket(handle).abort();
    guest.rest(Duration::from_millis(10)).await;
    let read = timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_closed_stack_leaves_nothing() {
    let (listener, address) = listener(true).await;
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let (stack, device, end) = start(StackLimits::default(), &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 443), 10_000);
    guest.until("established", |guest| guest.state(handle) == State::Established).await;
    let (mut stream, _) = listener.accept().await.unwrap();

    stack.close().await;

    assert!(matches!(timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap(), Ok(0) | Err(_)));
    assert_eq!(Arc::strong_count(&device), 1, "nobody holds the device");
    assert_eq!(handler.log.open().len(), 0);
}

#[tokio::test]
async fn a_sandbox_that_is_gone_is_noticed() {
    let (listener, address) = listener(true).await;
    let handler = FakeHandler::new();
    handler.say(outside(true, 443), Say::Dial(address));
    let limits = StackLimits {
        keep_alive: Duration::from_millis(50),
        dead: Duration::from_millis(300),
        ..StackLimits::default()
    };
    let (_stack, _, end) = start(limits, &handler);
    let mut guest = FakeGuest::new(end);
    let handle = guest.connect(outside(true, 443), 10_000);
    guest.until("established", |guest| guest.state(handle) == State::Established).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    // Silence alone is no reason while the sandbox answers.
    guest.rest(Duration::from_millis(600)).await;
    assert_eq!(guest.state(handle), State::Established);
    // From here on it does not.
    let read = timeout(PATIENCE, stream.read(&mut [0; 1])).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}
