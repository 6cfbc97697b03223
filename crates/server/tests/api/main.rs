//! The API as callers see it: over real sockets, with a real engine behind it.

// Fixtures are test code too, though not marked as tests.
#![allow(clippy::unwrap_used)]

mod audit;
mod bad_input;
mod damage;
mod drives;
mod fixture;
mod forks;
mod gateway;
mod limits;
mod lists;
mod memory;
mod network;
mod origin;
mod ports;
mod routes;
mod runs;
mod streams;
mod tenants;
mod tls;
mod vercel;
mod vercel_commands;
mod vercel_files;
mod vercel_terminal;
mod webhooks;
