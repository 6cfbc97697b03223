//! A driver without machines, and an engine on it, for tests without root.
//!
//! [`FakeDriver`] is stricter than the real ones: what the engine must not do is a panic, not an error.
//! Behind it is a [`FakeHost`], which outlives engines as a real host does, with an agent per machine
//! that speaks the agent link over a Unix socket (`agent`). Nothing is mounted: the agent reads and
//! writes the directories of the layers.

mod agent;
mod driver;
mod house;

pub use agent::Script;
pub use driver::{FakeDriver, FakeHost};
pub use house::{FakeHouse, RunningEngine, machine_of, ok, run, small};
