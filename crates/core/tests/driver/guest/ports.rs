//! TCP streams to ports inside.

use bytes::Bytes;
use sandkeep_proto::link::Failure;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::guest::machine::{Machine, all, failure};

#[tokio::test]
async fn bytes_go_both_ways_and_each_way_ends_by_itself() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it has one").port();
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("a caller");
        let mut heard = Vec::new();
        socket.read_to_end(&mut heard).await.expect("the caller ends");
        // Only now, with the caller's side ended, does it answer.
        socket.write_all(&heard).await.expect("the caller listens");
    });
    let (mut outgoing, mut incoming) = guest.connect_port(port).await.expect("it listens");
    let sent: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
    outgoing.send(Bytes::from(sent.clone())).await.expect("it reads");
    outgoing.end();
    let heard = all(&mut incoming).await.expect("it answers");
    assert!(heard == sent, "{} bytes of {}", heard.len(), sent.len());
    server.await.expect("no panic");
}

#[tokio::test]
async fn the_other_loopback_will_do() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        println!("SKIPPED the_other_loopback_will_do: this host has no IPv6");
        return;
    };
    let port = listener.local_addr().expect("it has one").port();
    let (_outgoing, mut incoming) = guest.connect_port(port).await.expect("it listens");
    let (mut socket, _) = listener.accept().await.expect("a caller");
    socket.write_all(b"hello").await.expect("the caller listens");
    drop(socket);
    assert_eq!(all(&mut incoming).await.expect("it answers"), b"hello");
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_refused() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it has one").port();
    drop(listener);
    assert_eq!(failure(guest.connect_port(port).await), Failure::Refused);
}
