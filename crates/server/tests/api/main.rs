//! The API as callers see it: over real sockets, with a real engine behind it.

mod bad_input;
mod fixture;
mod limits;
mod lists;
mod routes;
mod streams;
mod tenants;
