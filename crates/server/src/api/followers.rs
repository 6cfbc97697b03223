//! Who follows which command at the moment: a caller that lost its connection may reconnect before
//! its command is ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sandkeep_core::model::CommandId;

/// How long a caller that can reconnect may take.
pub(super) const RETURN: Duration = Duration::from_secs(10);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(250);

/// How many callers follow each command, by its log or by another call under its idempotency key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Followers(Arc<Mutex<HashMap<CommandId, usize>>>);

/// Somebody who follows a command, until this is dropped.
#[derive(Debug)]
pub(crate) struct Follower {
    followers: Followers,
    command: CommandId,
}

impl Followers {
    pub(crate) fn add(&self, command: CommandId) -> Follower {
        *self.0.lock().entry(command.clone()).or_default() += 1;
        Follower { followers: self.clone(), command }
    }

    fn has(&self, command: &CommandId) -> bool {
        self.0.lock().contains_key(command)
    }

    /// Whether somebody follows the command within a time.
    pub(crate) async fn returned(&self, command: &CommandId, within: Duration) -> bool {
        let look = async {
            while !self.has(command) {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::time::timeout(within, look).await.is_ok()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut followers = self.followers.0.lock();
        if let Some(count) = followers.get_mut(&self.command) {
            *count -= 1;
            if *count == 0 {
                followers.remove(&self.command);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandkeep_core::model::CommandId;

    use super::Followers;

    #[tokio::test]
    async fn a_follower_counts_while_it_is_there() {
        let (followers, command) = (Followers::default(), CommandId::fresh());
        let now = Duration::from_millis(1);
        assert!(!followers.returned(&command, now).await);
        let (one, two) = (followers.add(command.clone()), followers.add(command.clone()));
        drop(one);
        assert!(followers.returned(&command, now).await);
        drop(two);
        assert!(!followers.returned(&command, now).await);
        assert!(followers.0.lock().is_empty());
        let back = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            followers.add(command.clone())
        };
        let (returned, _back) =
            tokio::join!(followers.returned(&command, Duration::from_secs(30)), back);
        assert!(returned);
    }
}
