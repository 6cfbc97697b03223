//! Both ends of the agent link against each other: the daemon's `Guest` and the real `keep-agent`.

mod commands;
mod files;
mod hostile;
mod machine;
mod ports;
mod tars;
