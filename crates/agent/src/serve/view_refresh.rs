//! When what a sandbox sees of its limits is brought up to date: when a command starts, and while processes run.
//!
//! A sandbox without processes costs no wakeup. One whose processes wait costs one in [`SLOWEST`]: what they see does not change while
//! they do nothing.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::timeout;

use super::Agent;

/// How often while processes use CPU time.
const FASTEST: Duration = Duration::from_secs(1);
/// How often while they use next to none.
const SLOWEST: Duration = Duration::from_secs(32);

/// Brings it up to date for a command that has just been executed: it takes longer to come to reading anything.
pub(super) fn command_started(agent: &Agent) {
    if let Some(view) = &agent.view {
        view.borrow_mut().refresh();
        agent.starting.notify_one();
    }
}

/// Keeps it up to date for as long as there are processes.
pub(super) async fn keep_current(agent: Rc<Agent>) {
    let Some(view) = &agent.view else { return };
    view.borrow_mut().refresh();
    loop {
        agent.starting.notified().await;
        let mut pause = FASTEST;
        loop {
            if timeout(pause, agent.starting.notified()).await.is_ok() {
                pause = FASTEST;
                continue;
            }
            let activity = view.borrow_mut().refresh();
            // A command that has ended may have left others behind.
            if agent.running.borrow().is_empty() && activity.tasks <= 1 {
                break;
            }
            pause = if activity.idle { (pause * 2).min(SLOWEST) } else { FASTEST };
        }
    }
}
