//! The agent as the first process of a machine of its own.

mod life;
mod machine;
mod written;
