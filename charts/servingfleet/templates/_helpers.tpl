{{- define "servingfleet.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Cut to 50: what is made from it appends up to 13 characters and stays a DNS label. */}}
{{- define "servingfleet.fullname" -}}
{{- $name := include "servingfleet.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $full = .Release.Name -}}
{{- end -}}
{{- $full | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "servingfleet.serviceAccountName" -}}
{{- default (include "servingfleet.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "servingfleet.selectorLabels" -}}
app.kubernetes.io/name: servingfleet-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "servingfleet.labels" -}}
{{ include "servingfleet.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{/* Image of (dict "root" $ "of" .Values.image.relay). */}}
{{- define "servingfleet.image" -}}
{{- $repository := .of.repository -}}
{{- with .root.Values.image.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .of.digest -}}
{{- printf "%s@%s" $repository .of.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .of.tag) -}}
{{- end -}}
{{- end -}}

{{- define "servingfleet.subjects" -}}
- kind: ServiceAccount
  name: {{ include "servingfleet.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
