//! Limits the rate of lines about refused flows, so that a sandbox cannot fill the journal.
//!
//! Repeated refusals within a second share one line with their count. At most [`IN_TOTAL`] different refusals per second get a
//! line; of the rest only the number is written.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::timer::Timer;
use super::{ConnectionLog, FlowInfo};
use crate::model::Protocol;

const WINDOW: Duration = Duration::from_secs(1);
const IN_TOTAL: usize = 100;

#[derive(Debug)]
pub(in crate::net) struct Refusals {
    log: Arc<ConnectionLog>,
    window: Mutex<Option<RefusalWindow>>,
    /// Closes the window.
    timer: Timer,
}

type RefusalKey = (Protocol, Option<SocketAddr>, Option<String>, String);

/// The refusals since the window was opened.
#[derive(Debug)]
struct RefusalWindow {
    opened: Instant,
    repeats: HashMap<RefusalKey, u64>,
    overflow: u64,
}

impl Refusals {
    pub(in crate::net) fn new(log: Arc<ConnectionLog>) -> Arc<Self> {
        Arc::new(Self { log, window: Mutex::new(None), timer: Timer::default() })
    }

    /// Adds a refused flow.
    pub(in crate::net) fn add(self: &Arc<Self>, info: FlowInfo) {
        let mut window = self.window();
        if window.as_ref().is_some_and(|window| window.opened.elapsed() >= WINDOW) {
            let over = window.take();
            drop(window);
            self.write_counts(over);
            window = self.window();
        }
        let open = window.get_or_insert_with(|| {
            self.close_when_over();
            RefusalWindow { opened: Instant::now(), repeats: HashMap::new(), overflow: 0 }
        });
        let key = (info.protocol, info.to, info.name.clone(), info.rule.clone());
        if let Some(repeats) = open.repeats.get_mut(&key) {
            *repeats += 1;
        } else if open.repeats.len() < IN_TOTAL {
            open.repeats.insert(key, 0);
            drop(window);
            self.log.refused(info, None);
        } else {
            open.overflow += 1;
        }
    }

    /// Writes lines for everything that was only counted so far.
    pub(in crate::net) fn flush(&self) {
        let over = self.window().take();
        self.write_counts(over);
    }

    /// Closes the window when it ends, even if no further flow is refused.
    fn close_when_over(self: &Arc<Self>) {
        let this: Weak<Self> = Arc::downgrade(self);
        self.timer.set(WINDOW, move || {
            if let Some(this) = this.upgrade() {
                let mut window = this.window();
                let over = window.take_if(|window| window.opened.elapsed() >= WINDOW);
                drop(window);
                this.write_counts(over);
            }
        });
    }

    fn write_counts(&self, over: Option<RefusalWindow>) {
        let Some(RefusalWindow { repeats, overflow, .. }) = over else { return };
        for ((protocol, to, name, rule), count) in repeats {
            if count > 0 {
                let detail = format!("{count} more within a second");
                self.log.refused(FlowInfo { protocol, to, name, rule }, Some(detail));
            }
        }
        if overflow > 0 {
            let rule = "too many refusals to list".to_owned();
            let info = FlowInfo { protocol: Protocol::Tcp, to: None, name: None, rule };
            self.log.refused(info, Some(format!("{overflow} more within a second")));
        }
    }

    fn window(&self) -> MutexGuard<'_, Option<RefusalWindow>> {
        self.window.lock()
    }
}
