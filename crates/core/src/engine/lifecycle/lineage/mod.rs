//! Comparing forks and bringing them back: the files of a point, the common ancestor, promote,
//! merge, rename.
//!
//! | file | decides |
//! |---|---|
//! | `points` | which layers a point has, and keeps them while they are read |
//! | `comparing` | how much of it one project may ask for at a time |
//! | `ancestor` | where the histories of two sandboxes parted |
//! | `promote` | when an origin may become what its fork is |
//! | `merge` | how the changes of one sandbox get into another one |
//! | `into_drive` | how chosen files of a fork get into a drive |
//! | `artifacts` | how chosen files of a sandbox leave the server |
//! | `rename` | who has a name |
//!
//! `docs/FORKS.md` has the rules for users. What two trees of files differ in is decided in `store/diff/`.

pub(in crate::engine) mod ancestor;
pub(in crate::engine) mod artifacts;
pub(in crate::engine) mod comparing;
pub(in crate::engine) mod into_drive;
pub(in crate::engine) mod merge;
pub(in crate::engine) mod points;
pub(in crate::engine) mod promote;
pub(in crate::engine) mod rename;
