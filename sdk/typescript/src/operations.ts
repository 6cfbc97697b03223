/** Every operation of the API: method, path, whether it takes an idempotency key. Made by sdk/generate.py. Do not edit. */

import type * as types from "./types.js";

export const OPERATIONS = {
  accept_run: ["POST", "/v1/runs/{id}/accept", false],
  answer_approval: ["POST", "/v1/approvals/{id}/answer", false],
  ask_approval: ["POST", "/v1/sandboxes/{name}/approvals", false],
  audit: ["GET", "/v1/audit", false],
  build_image: ["POST", "/v1/images/build", false],
  cancel_run: ["POST", "/v1/runs/{id}/cancel", false],
  checkpoint_sandbox: ["POST", "/v1/sandboxes/{name}/checkpoint", false],
  connect_port: ["GET", "/v1/sandboxes/{name}/ports/{port}/ws", false],
  connect_port_raw: ["GET", "/v1/sandboxes/{name}/ports/{port}/connect", false],
  create_drive: ["POST", "/v1/drives", false],
  create_key: ["POST", "/v1/projects/{project}/keys", false],
  create_project: ["POST", "/v1/projects", false],
  create_sandbox: ["POST", "/v1/sandboxes", true],
  create_webhook: ["POST", "/v1/webhooks", false],
  customize_image: ["POST", "/v1/images/customize", false],
  damage: ["GET", "/v1/damage", false],
  delete_drive: ["DELETE", "/v1/drives/{name}", false],
  delete_project: ["DELETE", "/v1/projects/{project}", false],
  delete_quarantine: ["DELETE", "/v1/quarantine/{id}", false],
  delete_sandbox: ["DELETE", "/v1/sandboxes/{name}", true],
  delete_secret: ["DELETE", "/v1/secrets/{name}", false],
  delete_snapshot: ["DELETE", "/v1/snapshots/{id}", false],
  delete_webhook: ["DELETE", "/v1/webhooks/{id}", false],
  diff: ["GET", "/v1/diff", false],
  diff_patch: ["GET", "/v1/diff/patch", false],
  empty_trash: ["DELETE", "/v1/trash", false],
  events: ["GET", "/v1/events", false],
  exec: ["POST", "/v1/sandboxes/{name}/exec", true],
  exec_web_socket: ["GET", "/v1/sandboxes/{name}/exec/ws", false],
  export_snapshot: ["GET", "/v1/snapshots/{id}/export", false],
  extend_session: ["POST", "/v1/sandboxes/{name}/extend", false],
  finish_run: ["POST", "/v1/runs/{id}/finish", false],
  fork_drive: ["POST", "/v1/drives/{name}/fork", false],
  fork_sandbox: ["POST", "/v1/sandboxes/{name}/fork", true],
  fsck: ["POST", "/v1/fsck", false],
  get_approval: ["GET", "/v1/approvals/{id}", false],
  get_command: ["GET", "/v1/sandboxes/{name}/commands/{id}", false],
  get_command_changes: ["GET", "/v1/sandboxes/{name}/commands/{id}/changes", false],
  get_drive: ["GET", "/v1/drives/{name}", false],
  get_image: ["GET", "/v1/images/{name}", false],
  get_logs: ["GET", "/v1/sandboxes/{name}/commands/{id}/logs", false],
  get_network: ["GET", "/v1/sandboxes/{name}/network", false],
  get_project_network: ["GET", "/v1/projects/{project}/network", false],
  get_project_runs: ["GET", "/v1/projects/{project}/governance", false],
  get_run: ["GET", "/v1/runs/{id}", false],
  get_sandbox: ["GET", "/v1/sandboxes/{name}", false],
  get_secret: ["GET", "/v1/secrets/{name}", false],
  get_snapshot: ["GET", "/v1/snapshots/{id}", false],
  get_stats: ["GET", "/v1/sandboxes/{name}/stats", false],
  get_tree: ["GET", "/v1/sandboxes/{name}/tree", false],
  get_webhook: ["GET", "/v1/webhooks/{id}", false],
  health: ["GET", "/healthz", false],
  import_image: ["POST", "/v1/images/import", false],
  issue_port_token: ["POST", "/v1/sandboxes/{name}/ports/{port}/token", false],
  issue_token: ["POST", "/v1/tokens", false],
  list_approvals: ["GET", "/v1/approvals", false],
  list_commands: ["GET", "/v1/sandboxes/{name}/commands", false],
  list_connections: ["GET", "/v1/sandboxes/{name}/connections", false],
  list_drives: ["GET", "/v1/drives", false],
  list_files: ["GET", "/v1/sandboxes/{name}/files/list", false],
  list_forks: ["GET", "/v1/forks", false],
  list_images: ["GET", "/v1/images", false],
  list_keys: ["GET", "/v1/projects/{project}/keys", false],
  list_ports: ["GET", "/v1/sandboxes/{name}/ports", false],
  list_projects: ["GET", "/v1/projects", false],
  list_quarantine: ["GET", "/v1/quarantine", false],
  list_runs: ["GET", "/v1/runs", false],
  list_sandbox_snapshots: ["GET", "/v1/sandboxes/{name}/snapshots", false],
  list_sandboxes: ["GET", "/v1/sandboxes", false],
  list_secrets: ["GET", "/v1/secrets", false],
  list_services: ["GET", "/v1/sandboxes/{name}/services", false],
  list_sessions: ["GET", "/v1/sandboxes/{name}/sessions", false],
  list_snapshots: ["GET", "/v1/snapshots", false],
  list_stats: ["GET", "/v1/stats", false],
  list_trash: ["GET", "/v1/trash", false],
  list_webhooks: ["GET", "/v1/webhooks", false],
  make_directory: ["POST", "/v1/sandboxes/{name}/files/mkdir", false],
  merge_sandbox: ["POST", "/v1/sandboxes/{name}/merge", false],
  metrics: ["GET", "/metrics", false],
  move_file: ["POST", "/v1/sandboxes/{name}/files/move", false],
  pause_sandbox: ["POST", "/v1/sandboxes/{name}/pause", false],
  pin_run_again: ["POST", "/v1/runs/{id}/review", false],
  promote_into_drive: ["POST", "/v1/drives/{name}/promote", false],
  promote_sandbox: ["POST", "/v1/sandboxes/{name}/promote", true],
  prune_builds: ["POST", "/v1/images/prune", false],
  publish_port: ["PUT", "/v1/sandboxes/{name}/ports/{port}", false],
  pull_image: ["POST", "/v1/images/pull", false],
  read_file: ["GET", "/v1/sandboxes/{name}/files", false],
  read_tar: ["GET", "/v1/sandboxes/{name}/files/tar", false],
  ready: ["GET", "/readyz", false],
  reject_run: ["POST", "/v1/runs/{id}/reject", false],
  remove_file: ["DELETE", "/v1/sandboxes/{name}/files", false],
  remove_image: ["DELETE", "/v1/images/{name}", false],
  remove_service: ["DELETE", "/v1/sandboxes/{name}/services/{service}", false],
  rename_sandbox: ["POST", "/v1/sandboxes/{name}/rename", false],
  resize_command: ["POST", "/v1/sandboxes/{name}/commands/{id}/resize", false],
  restore_sandbox: ["POST", "/v1/trash/{sandbox}/restore", false],
  review_run: ["GET", "/v1/runs/{id}/review", false],
  revoke_key: ["DELETE", "/v1/projects/{project}/keys/{key}", false],
  rollback_sandbox: ["POST", "/v1/sandboxes/{name}/rollback", false],
  rotate_webhook_secret: ["POST", "/v1/webhooks/{id}/rotate", false],
  run_heartbeat: ["POST", "/v1/runs/{id}/heartbeat", false],
  send_stdin: ["POST", "/v1/sandboxes/{name}/commands/{id}/stdin", false],
  set_network: ["PUT", "/v1/sandboxes/{name}/network", false],
  set_project_network: ["PUT", "/v1/projects/{project}/network", false],
  set_project_runs: ["PUT", "/v1/projects/{project}/governance", false],
  set_secret: ["PUT", "/v1/secrets/{name}", false],
  set_service: ["PUT", "/v1/sandboxes/{name}/services/{service}", false],
  signal_command: ["POST", "/v1/sandboxes/{name}/commands/{id}/signal", false],
  start_run: ["POST", "/v1/runs", false],
  start_sandbox: ["POST", "/v1/sandboxes/{name}/start", false],
  start_service: ["POST", "/v1/sandboxes/{name}/services/{service}/start", false],
  stat_file: ["GET", "/v1/sandboxes/{name}/files/stat", false],
  stop_sandbox: ["POST", "/v1/sandboxes/{name}/stop", true],
  stop_service: ["POST", "/v1/sandboxes/{name}/services/{service}/stop", false],
  summarize_connections: ["GET", "/v1/sandboxes/{name}/connections/summary", false],
  take_artifacts: ["POST", "/v1/sandboxes/{name}/artifacts", false],
  test_webhook: ["POST", "/v1/webhooks/{id}/test", false],
  update_sandbox: ["PATCH", "/v1/sandboxes/{name}", false],
  update_webhook: ["PATCH", "/v1/webhooks/{id}", false],
  usage: ["GET", "/v1/usage", false],
  verify_audit: ["GET", "/v1/audit/verify", false],
  who_am_i: ["GET", "/v1/whoami", false],
  why_sandbox: ["GET", "/v1/sandboxes/{name}/why", false],
  write_file: ["PUT", "/v1/sandboxes/{name}/files", false],
  write_tar: ["PUT", "/v1/sandboxes/{name}/files/tar", false],
} as const;

/** The name of an operation. */
export type Operation = keyof typeof OPERATIONS;

/** What operations answer as JSON. */
export interface Answers {
  accept_run: types.RunAccepted;
  answer_approval: types.Approval;
  ask_approval: types.Approval;
  audit: types.Page<types.AuditEntry>;
  build_image: undefined;
  cancel_run: types.Run;
  checkpoint_sandbox: types.Snapshot;
  connect_port: undefined;
  connect_port_raw: undefined;
  create_drive: types.Drive;
  create_key: types.NewKey;
  create_project: types.Project;
  create_sandbox: types.Opened;
  create_webhook: types.NewWebhook;
  customize_image: undefined;
  damage: types.Page<types.Damage>;
  delete_drive: types.Drive;
  delete_project: undefined;
  delete_quarantine: types.Quarantine;
  delete_sandbox: types.Deleted;
  delete_secret: types.Secret;
  delete_snapshot: types.SnapshotDeleted;
  delete_webhook: undefined;
  diff: types.Diff;
  diff_patch: undefined;
  empty_trash: types.TrashEmptied;
  events: undefined;
  exec: undefined;
  exec_web_socket: undefined;
  export_snapshot: undefined;
  extend_session: types.Session;
  finish_run: types.Run;
  fork_drive: types.Drive;
  fork_sandbox: types.Forked;
  fsck: types.Fsck;
  get_approval: types.Approval;
  get_command: types.Command;
  get_command_changes: types.CommandChangeList;
  get_drive: types.Drive;
  get_image: types.Image;
  get_logs: undefined;
  get_network: types.SandboxNetwork;
  get_project_network: types.ProjectNetwork;
  get_project_runs: types.ProjectRuns;
  get_run: types.Run;
  get_sandbox: types.Sandbox;
  get_secret: types.Secret;
  get_snapshot: types.Snapshot;
  get_stats: types.SandboxStats;
  get_tree: types.Tree;
  get_webhook: types.Webhook;
  health: types.Health;
  import_image: undefined;
  issue_port_token: types.PortToken;
  issue_token: types.Token;
  list_approvals: types.Page<types.Approval>;
  list_commands: types.Page<types.Command>;
  list_connections: types.Page<types.Connection>;
  list_drives: types.Page<types.Drive>;
  list_files: types.Listing;
  list_forks: types.Page<types.Sandbox>;
  list_images: types.Page<types.Image>;
  list_keys: types.Page<types.Key>;
  list_ports: types.Page<types.PortStatus>;
  list_projects: types.Page<types.Project>;
  list_quarantine: types.Page<types.Quarantine>;
  list_runs: types.Page<types.Run>;
  list_sandbox_snapshots: types.Page<types.Snapshot>;
  list_sandboxes: types.Page<types.Sandbox>;
  list_secrets: types.Secret[];
  list_services: types.Page<types.ServiceStatus>;
  list_sessions: types.Page<types.Session>;
  list_snapshots: types.Page<types.Snapshot>;
  list_stats: types.Page<types.SandboxStats>;
  list_trash: types.Page<types.TrashItem>;
  list_webhooks: types.Page<types.Webhook>;
  make_directory: undefined;
  merge_sandbox: types.Merged;
  metrics: undefined;
  move_file: undefined;
  pause_sandbox: types.Paused;
  pin_run_again: types.RunReview;
  promote_into_drive: types.PromotedIntoDrive;
  promote_sandbox: types.Promoted;
  prune_builds: types.PrunedBuilds;
  publish_port: types.PortStatus;
  pull_image: undefined;
  read_file: undefined;
  read_tar: undefined;
  ready: types.Readiness;
  reject_run: types.Run;
  remove_file: undefined;
  remove_image: undefined;
  remove_service: undefined;
  rename_sandbox: types.Sandbox;
  resize_command: undefined;
  restore_sandbox: types.Sandbox;
  review_run: types.RunReview;
  revoke_key: undefined;
  rollback_sandbox: types.RolledBack;
  rotate_webhook_secret: types.NewWebhook;
  run_heartbeat: types.Run;
  send_stdin: undefined;
  set_network: types.SandboxNetwork;
  set_project_network: types.ProjectNetwork;
  set_project_runs: types.ProjectRuns;
  set_secret: types.Secret;
  set_service: types.ServiceStatus;
  signal_command: undefined;
  start_run: types.Run;
  start_sandbox: types.Opened;
  start_service: types.ServiceStatus;
  stat_file: types.Entry;
  stop_sandbox: types.Stopped;
  stop_service: types.ServiceStatus;
  summarize_connections: types.NetworkSummary;
  take_artifacts: undefined;
  test_webhook: types.WebhookDelivery;
  update_sandbox: types.Sandbox;
  update_webhook: types.Webhook;
  usage: types.SpaceUsage;
  verify_audit: types.AuditVerification;
  who_am_i: types.WhoAmI;
  why_sandbox: types.Why;
  write_file: types.Moved;
  write_tar: types.Moved;
}
