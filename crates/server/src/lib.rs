//! HTTP fronts on the engine.
//!
//! - [`listen`]: sockets, connections, graceful shutdown; [`serve`] is all a program needs.
//! - `api`: the routes of `/v1`. A handler parses, asks the engine, and words the answer.
//! - `compat`: the same engine in other vendors' words, for their clients.
//! - `gateway`: the way from outside to a port inside a sandbox.
//! - `audit`: records what all fronts are asked, and how it ended.
//! - `auth`: whose key it is and how far its scope reaches, per route.
//! - [`tls`]: certificate and key of the TCP listeners, loaded again when they change.
//! - `connections`: how many there may be, and who makes room.
//! - [`limits`]: how much a caller may send, how fast and how long.
//! - `meters`: what is counted of requests, for `/metrics`.
//! - `origin`: which names and web pages may reach it.
//! - `request_id`: the id of each request, in its answer and in its log lines.
//! - `error`: how anything that went wrong becomes a status and a JSON body.
//! - [`openapi`]: the description of `/v1`, made from the routes and types themselves.
//!
//! Nothing is decided here that another front would have to decide again: rules about sandboxes live
//! in the engine, words on the wire in `sandkeep-client`.

#![forbid(unsafe_code)]

mod api;
mod audit;
mod auth;
mod compat;
mod connections;
mod error;
mod gateway;
pub mod limits;
pub mod listen;
mod meters;
pub mod openapi;
mod origin;
mod request_id;
pub mod tls;

pub use compat::vercel::VercelSettings;
pub use gateway::GatewaySettings;
pub use limits::Limits;
pub use listen::{ServeConfig, ServeError, Server, serve};
pub use origin::WebSettings;
pub use tls::{TlsError, TlsFiles};
