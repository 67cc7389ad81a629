//! Numbers about this process, and summaries of many.

use std::fs;
use std::time::Duration;

use crate::Result;

/// What a process has used so far, as Linux counts it.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The most resident memory it ever had, in KiB.
    pub peak_kib: u64,
    /// Processor time, in user and kernel mode.
    pub cpu: Duration,
}

impl Usage {
    /// That of this process.
    pub fn of_this_process() -> Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak_kib = peak.and_then(|rest| rest.split_whitespace().next()).ok_or("no VmHWM")?.parse()?;
        // The second field is the program's name in parentheses and may hold spaces.
        let stat = fs::read_to_string("/proc/self/stat")?;
        let (_, fields) = stat.rsplit_once(')').ok_or("no name in stat")?;
        let ticks: u64 =
            fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap_or(0)).sum();
        // A tick is 10 ms on every Linux that Rust runs on.
        Ok(Self { peak_kib, cpu: Duration::from_millis(ticks * 10) })
    }
}

/// The value at `share` (0 to 1) of sorted values; `None` where there are none.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let index = (sorted.len().saturating_sub(1) as f64 * share.clamp(0.0, 1.0)).round() as usize;
    sorted.get(index).copied()
}

/// Median, least and greatest of some values, for people.
pub fn summary(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let at = |share| quantile(&values, share).unwrap_or(f64::NAN);
    format!("median {:.3}, min {:.3}, max {:.3}", at(0.5), at(0.0), at(1.0))
}
