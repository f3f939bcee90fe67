// The door to the monitor: answers as they come, and a stream that the browser opens again by itself.

export async function ask(path, query = {}) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`);
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? `${answer.status}`);
  return value;
}

// onChange gets every message; onLink whether the stream stands. Returns what closes it.
export function follow(job, afterVersion, onChange, onLink) {
  const stream = new EventSource(`/api/watch?${new URLSearchParams({ job, after: afterVersion })}`);
  stream.onopen = () => onLink(true);
  stream.onerror = () => onLink(false);
  stream.onmessage = (message) => onChange(JSON.parse(message.data));
  return () => stream.close();
}
