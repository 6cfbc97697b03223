//! TCP streams to ports inside the sandbox.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::rc::Rc;
use std::time::Duration;

use sandkeep_proto::frame::{CHUNK, FrameKind};
use sandkeep_proto::link::{Done, Failure, Reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

use crate::serve::error::{RequestError, kind_of, say};
use crate::serve::files::worker::{Input, Transfer};
use crate::serve::link::connection::Stream;
use crate::serve::link::outbound::Outbound;

/// How long a listener on loopback may take to accept; only one with a full queue takes any time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects `stream` to a port and carries bytes both ways.
pub(super) fn connect(out: &Rc<Outbound>, stream: u32, port: u16) {
    let mine = Rc::clone(out);
    let (transfer, input) = Transfer::new();
    let carried = Rc::clone(&transfer);
    let task = tokio::task::spawn_local(async move {
        let socket = match dial(port).await {
            Ok(socket) => socket,
            Err(problem) => return mine.finish(stream, &problem.reply()),
        };
        mine.reply(stream, &Reply::Ok);
        // What is sent is sent for a reason; waiting for more only adds latency.
        let _ = socket.set_nodelay(true);
        let (read, write) = socket.into_split();
        let outcome = tokio::try_join!(
            from_port(read, &carried, &mine, stream),
            to_port(write, input, &carried, &mine, stream)
        );
        let done = match outcome {
            Ok((from, to)) => Done::Moved { bytes: from + to, files: 0 },
            Err(error) => {
                let message = format!("the connection to port {port} broke: {}", say(&error));
                RequestError::new(kind_of(&error), message).done()
            }
        };
        mine.done(stream, &done);
    });
    out.streams.borrow_mut().insert(stream, Stream::task(task.abort_handle(), Some(transfer)));
}

async fn dial(port: u16) -> Result<TcpStream, RequestError> {
    let attempt = async {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
            Ok(socket) => Ok(socket),
            // The first error is the one to report: a sandbox need not have IPv6 at all.
            Err(error) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.map_err(|_| error),
        }
    };
    match timeout(PATIENCE, attempt).await {
        Ok(Ok(socket)) => Ok(socket),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Err(RequestError::new(Failure::Refused, format!("nothing listens on port {port}")))
        }
        Ok(Err(error)) => Err(RequestError::new(
            kind_of(&error),
            format!("could not connect to port {port}: {}", say(&error)),
        )),
        Err(_) => {
            let message = format!("port {port} does not accept connections");
            Err(RequestError::new(Failure::Refused, message))
        }
    }
}

async fn from_port(
    mut read: OwnedReadHalf,
    transfer: &Transfer,
    out: &Outbound,
    stream: u32,
) -> io::Result<u64> {
    let mut moved = 0;
    let mut buffer = vec![0; CHUNK / 4];
    loop {
        let count = read.read(&mut buffer).await?;
        if count == 0 {
            out.push(stream, FrameKind::End, &[]);
            return Ok(moved);
        }
        transfer.send(out, stream, buffer.get(..count).unwrap_or_default()).await;
        moved += count as u64;
    }
}

async fn to_port(
    mut write: OwnedWriteHalf,
    mut input: UnboundedReceiver<Input>,
    transfer: &Transfer,
    out: &Outbound,
    stream: u32,
) -> io::Result<u64> {
    let mut moved = 0;
    while let Some(Input::Data(bytes)) = input.recv().await {
        write.write_all(&bytes).await?;
        moved += bytes.len() as u64;
        transfer.took(out, stream, bytes.len());
    }
    write.shutdown().await?;
    Ok(moved)
}
