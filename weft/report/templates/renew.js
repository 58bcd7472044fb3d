// Renews the page, and keeps what the reader has opened.
setInterval(async () => {
  const answer = await fetch("/").catch(() => null);
  if (!answer || !answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const opened = [...document.querySelectorAll("details[open], input:checked")].map((e) => e.id);
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  for (const id of opened) {
    const element = document.getElementById(id);
    if (element) element.open = element.checked = true;
  }
}, 5000);
