// Asks `selftask watch` for the same page every 2 seconds and shows what has changed in it. The zoom,
// the order of tables, marks and what is unfolded stay.
(() => {
  const EVERY_MS = 2000;
  const status = document.getElementById("live-status");
  const shown = new Map(); // content of a part as it came: what the browser makes of it may differ
  let tag = "";
  let pointerIsDown = false; // charts are not redrawn below a zoom that is being drawn
  addEventListener("pointerdown", () => (pointerIsDown = true));
  addEventListener("pointerup", () => (pointerIsDown = false));

  const parts = (page) => [...page.querySelectorAll("#live-head, main > section")];
  const names = (data) => JSON.stringify(data.charts.map((chart) => [chart.title, ...chart.curves.map((c) => c.label)]));

  async function update() {
    const answer = await fetch(location.href, { cache: "no-store", headers: { "If-None-Match": tag } });
    if (answer.status === 304) return;
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    const page = new DOMParser().parseFromString(text, "text/html");
    const [before, now] = [parts(document), parts(page)];
    if (String(before.map((part) => part.id)) !== String(now.map((part) => part.id))) return location.reload();
    now.forEach((part, number) => replace(before[number], part));
    tag = answer.headers.get("ETag");
  }

  function replace(element, news) {
    const html = news.innerHTML;
    if ((shown.get(element.id) ?? element.innerHTML) === html) return;
    shown.set(element.id, html);
    const box = news.querySelector("[data-charts]");
    if (box) return redraw(element, box.dataset.charts, news);
    const unfolded = [...element.querySelectorAll("details")].map((details) => details.open);
    const marked = [...element.querySelectorAll("input:checked")].map((input) => input.value);
    const sorted = element.querySelector("th[aria-sort]");
    element.innerHTML = html;
    element.querySelectorAll("details").forEach((details, i) => (details.open ||= Boolean(unfolded[i])));
    element.querySelectorAll("input").forEach((input) => (input.checked = marked.includes(input.value)));
    element.dispatchEvent(new Event("change", { bubbles: true }));
    const head = sorted && [...element.querySelectorAll("th")].find((th) => th.textContent === sorted.textContent);
    if (head) selftask.sortBy(head, sorted.getAttribute("aria-sort") === "descending");
  }

  function redraw(element, id, news) {
    const group = selftask.charts[id];
    const data = JSON.parse(news.querySelector(`[id="${id}"]`).textContent);
    if (!group || names(group.data) !== names(data)) location.reload();
    else group.setData(data);
  }

  async function keepUp() {
    if (!document.hidden && !pointerIsDown) {
      try {
        await update();
        status.textContent = `live, updated ${new Date().toLocaleTimeString()}`;
      } catch {
        status.textContent = "no answer from selftask watch: these are the last values it gave";
      }
      status.classList.toggle("warning", !status.textContent.startsWith("live"));
    }
    setTimeout(keepUp, EVERY_MS);
  }

  // The link of the overview to the comparison of the marked runs.
  addEventListener("change", () => {
    const link = document.getElementById("compare");
    if (!link) return;
    const marked = [...document.querySelectorAll("#runs input:checked")].map((box) => ["run", box.value]);
    link.href = marked.length ? `/compare?${new URLSearchParams(marked)}` : "/compare";
    link.textContent = marked.length ? `compare ${marked.length} of the runs` : "compare all runs";
  });
  setTimeout(keepUp, EVERY_MS);
})();
